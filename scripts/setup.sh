# Sourced by ./demo, ./test, .ci/run and the scripts that build: system packages and build folders.

packages=(cmake g++ libcli11-dev libdlpack-dev libfmt-dev libgtest-dev libhwy-dev libopenblas0
          libtbb-dev libxxhash-dev ninja-build nlohmann-json3-dev pkg-config)

# Installs those of its arguments that are missing. Says nothing when none is.
need_packages() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^.i' ||
      missing+=("$package")
  done
  [ "${#missing[@]}" -gt 0 ] || return 0
  if ! command -v apt-get >/dev/null; then
    echo "Pullback sets itself up on Debian 12+ and Ubuntu 24.04+. Elsewhere, install by hand what" >&2
    echo "corresponds to these packages, and build with CMake: ${missing[*]}" >&2
    exit 1
  fi

  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    # In a terminal sudo may ask for the password; elsewhere only a sudo that asks nothing will do.
    if command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
      as_root=(sudo)
    else
      echo "System packages are missing. Run this as root, then start again:" >&2
      echo "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
      exit 1
    fi
  fi
  echo "Installing system packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# Finds NVRTC, or unpacks its Python wheel into FOLDER, and sets PULLBACK_NVRTC. The release is the one
# that tests/cuda/budgets.json was recorded with.
# need_nvrtc FOLDER
need_nvrtc() {
  local folder=$1/nvrtc wheel=nvidia-cuda-nvrtc==13.0.88
  [ -z "${PULLBACK_NVRTC:-}" ] || return 0
  if [ ! -e "$folder/nvidia/cu13/lib/libnvrtc.so.13" ]; then
    python3 -m pip --version >/dev/null 2>&1 || need_packages python3-pip
    rm -rf "$folder" && mkdir -p "$folder"
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
      -d "$folder" "$wheel" || return 1
    python3 -m zipfile -e "$folder"/*.whl "$folder"
    rm "$folder"/*.whl
  fi
  export PULLBACK_NVRTC=$PWD/$folder/nvidia/cu13/lib
}

# Where pip finds PyTorch for PYTHON: PyPI's brings gigabytes of CUDA libraries, so the CPU's, unless an
# index is configured, or that one does not answer: pip would ask it for every package, five times each.
# prefer_cpu_torch PYTHON
prefer_cpu_torch() {
  local index=https://download.pytorch.org/whl/cpu config
  config=$("$1" -m pip config list)
  [[ ! $config =~ index-url|find-links ]] || return 0
  if "$1" -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=20)" 2>/dev/null; then
    export PIP_EXTRA_INDEX_URL=$index
  fi
}

# configure FOLDER [CMAKE OPTIONS...]; quiet unless it fails.
configure() {
  local folder=$1 launcher=()
  shift
  if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
  mkdir -p "$folder"
  if ! cmake -S . -B "$folder" -G Ninja -DPULLBACK_PRECOMPILE=ON "${launcher[@]}" "$@" \
    >"$folder/configure.log" 2>&1; then
    cat "$folder/configure.log" >&2
    exit 1
  fi
}

# As many compilers as there are cores, and memory: 1.5 GB for each.
jobs() {
  local cores fit
  cores=$(nproc)
  fit=$(($(awk '/^MemAvailable:/ {print $2}' /proc/meminfo) / 1572864))
  [ "$fit" -ge 1 ] || fit=1
  echo $((fit < cores ? fit : cores))
}

# build FOLDER [TARGET...]
build() {
  ninja -C "$1" -j "$(jobs)" "${@:2}"
}

# run_tests FOLDER [CTEST OPTIONS...]; ends with the sum over all tests of all test programs.
run_tests() {
  local folder=$1 results failed=0
  shift
  results=$PWD/$folder/test_results
  rm -rf "$results"
  GTEST_OUTPUT="xml:$results/" ctest --test-dir "$folder" --output-on-failure --no-tests=error \
    --parallel "$(nproc)" --output-junit "$results.xml" "$@" || failed=$?

  # A GoogleTest program leaves its own counts, unless it crashed; any other test counts as one.
  local passes=0 failures=0 name status counts
  while read -r name status; do
    if [ -f "$results/$name.xml" ]; then
      counts=$(grep -m1 '<testsuites ' "$results/$name.xml")
      local tests bad off
      tests=$(sed -E 's/.* tests="([0-9]+)".*/\1/' <<<"$counts")
      bad=$(sed -E 's/.* failures="([0-9]+)".*/\1/' <<<"$counts")
      off=$(grep -cE 'result="(skipped|suppressed)"' "$results/$name.xml" || true)
      failures=$((failures + bad))
      passes=$((passes + tests - bad - off))
    elif [ "$status" = run ]; then
      passes=$((passes + 1))
    else
      failures=$((failures + 1))
    fi
  done < <(sed -nE 's/.*<testcase name="([^"]+)".* status="([a-z]+)".*/\1 \2/p' "$results.xml")
  echo "$passes passed, $failures failed"
  return "$failed"
}
