#!/usr/bin/env bash
# The whole suite on a GPU, then its quick part under compute-sanitizer. Runs in a checkout that was
# built, or in a folder made by gpu_pack.sh.
#   gpu_test.sh [all|suite|torch|memcheck|racecheck|initcheck|synccheck]
# "torch" needs a folder made by gpu_pack.sh, and a python3 with PyTorch; PULLBACK_PYTHON names it.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
what=${1:-all}
if [ -d "$here/bin" ]; then
  tests=("$here"/bin/*_test)
  export LD_LIBRARY_PATH=$here/bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  tests=("$here"/../build/tests/cuda_test)
  for path in "$here"/../src/ops/*/cuda; do
    tests+=("$here/../build/tests/$(basename "$(dirname "$path")")_test")
  done
fi
if [ -z "${PULLBACK_NVRTC:-}" ]; then
  # The wheel that PyTorch brings along.
  folder=$(python3 -c 'import nvidia.cu13 as m; print(list(m.__path__)[0])' 2>/dev/null)/lib
  if [ -e "$folder/libnvrtc.so.13" ]; then export PULLBACK_NVRTC=$folder; fi
fi
if ! nvidia-smi -L; then
  echo "gpu_test.sh: no GPU here" >&2
  exit 3
fi
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
failed=0

run() {  # NAME COMMAND...
  local name=$1 start=$SECONDS log
  shift
  log=$(mktemp)
  if "$@" >"$log" 2>&1; then
    echo "passed  $name, $((SECONDS - start)) s: $(grep -E '^\[  PASSED|ERROR SUMMARY|[0-9]+ passed' "$log" | tr '\n' ' ')"
  else
    echo "FAILED  $name, $((SECONDS - start)) s"
    grep -vE '^\[ RUN|^\[       OK|^\[-----|SKIPPED' "$log" | head -60
    failed=1
  fi
  rm -f "$log"
}

suite() {
  local test filter
  for test in "${tests[@]}"; do
    filter='*cuda*'
    [ "$(basename "$test")" = cuda_test ] && filter='-budgets.*'
    run "$(basename "$test")" "$test" --gtest_brief=1 --gtest_filter="$filter"
  done
}

# TOOL FILTER: kernels are tens of times slower under a sanitizer, so a part of the cases has to do.
sanitize() {
  local tool=$1 filter=$2 test
  for test in "${tests[@]}"; do
    PULLBACK_FUZZ_COUNT=25 PULLBACK_RAW_WORKSPACE=$([ "$tool" = initcheck ] && echo 1) \
      run "$tool $(basename "$test")" "$sanitizer" --tool "$tool" --error-exitcode 1 \
      "$test" --gtest_brief=1 --gtest_filter="$filter"
  done
}

quick='OnDevice*:*_cuda_fuzz.*:*_cuda_cases.*_f32'
few='OnDevice*:*_cuda_fuzz.*'
# The PyTorch suite on CUDA tensors.
torch_suite() {
  [ -d "$here/site" ] || return 0
  PYTHONPATH=$here/site run "PyTorch suite" "${PULLBACK_PYTHON:-python3}" -m pytest -q --tb=short \
    -p no:cacheprovider "$here/python_tests" -k cuda
}

case $what in
  suite) suite ;;
  torch) torch_suite ;;
  memcheck | initcheck) sanitize "$what" "$quick" ;;
  racecheck | synccheck) sanitize "$what" "$few" ;;
  all)
    suite
    torch_suite
    sanitize memcheck "$quick"
    sanitize racecheck "$few"
    sanitize initcheck "$few"
    sanitize synccheck "$few"
    ;;
  *)
    echo "usage: gpu_test.sh [all|suite|torch|memcheck|racecheck|initcheck|synccheck]" >&2
    exit 2
    ;;
esac
exit $failed
