#!/usr/bin/env bash
# The whole suite on a GPU, then its quick part under compute-sanitizer. Runs in a checkout that was
# built, or in a folder made by gpu_pack.sh.
#   gpu_test.sh [all|suite|torch|memcheck|racecheck|initcheck|synccheck] [OP ...]
# With OP, only the tests of these ops. "torch" needs a folder made by gpu_pack.sh, and a python3 with
# PyTorch; PULLBACK_PYTHON names it. PULLBACK_JOBS processes (all cores) share the cases of a test.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
what=${1:-all}
shift || true
jobs=${PULLBACK_JOBS:-$(nproc)}
if [ -d "$here/bin" ]; then
  folder=$here/bin pullback=$here/bin/pullback
  export LD_LIBRARY_PATH=$here/bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  folder=$here/../build/tests pullback=$here/../build/tools/pullback/pullback
fi
ops=("$@")
if [ $# = 0 ]; then
  for path in "$here"/bin/*_test "$here"/../src/ops/*/cuda; do
    case $path in
      *'*'*) ;;
      */cuda) ops+=("$(basename "$(dirname "$path")")") ;;
      *) ops+=("$(basename "$path" _test)") ;;
    esac
  done
  [ -d "$here/bin" ] || ops+=(cuda)
fi
if [ -z "${PULLBACK_NVRTC:-}" ]; then
  # The wheel that PyTorch brings along.
  wheel=$(python3 -c 'import nvidia.cu13 as m; print(list(m.__path__)[0])' 2>/dev/null)/lib
  if [ -e "$wheel/libnvrtc.so.13" ]; then export PULLBACK_NVRTC=$wheel; fi
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

# Before processes side by side would each compile the same kernels.
compile() {
  local arch pattern
  arch=sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  pattern=$(IFS='|'; echo "^(${ops[*]})")
  case " ${ops[*]} " in *" cuda "*) pattern=. ;; esac
  "$pullback" compile --arch "$arch" --match "$pattern" >/dev/null 2>&1 || echo "not compiled ahead" >&2
}

# NAME FILTER COMMAND...: its tests, shared out among processes.
shards() {
  local name=$1 filter=$2 start=$SECONDS logs bad=0 i pids=()
  shift 2
  logs=$(mktemp -d)
  for ((i = 0; i < jobs; ++i)); do
    GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$i "$@" --gtest_brief=1 --gtest_filter="$filter" \
      >"$logs/$i" 2>&1 &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || bad=1; done
  local passed
  passed=$(sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?\./\1/p' "$logs"/* | awk '{ n += $1 } END { print n + 0 }')
  if [ $bad = 0 ]; then
    echo "passed  $name, $((SECONDS - start)) s: $passed tests"
  else
    echo "FAILED  $name, $((SECONDS - start)) s: $passed tests passed"
    grep -hvE '^\[ RUN|^\[       OK|^\[-----|^\[=====|SKIPPED|PASSED|SUMMARY: 0|^Running|^Note|^$|^=========$' \
      "$logs"/* | head -80
    failed=1
  fi
  rm -rf "$logs"
}

suite() {
  local op filter
  for op in "${ops[@]}"; do
    filter='*cuda*'
    [ "$op" = cuda ] && filter='-budgets.*'
    shards "${op}_test" "$filter" "$folder/${op}_test"
  done
}

# Kernels are tens of times slower under a sanitizer, so a part of the cases has to do.
sanitize() {
  local tool=$1 op
  for op in "${ops[@]}"; do
    PULLBACK_FUZZ_COUNT=8 PULLBACK_RAW_WORKSPACE=$([ "$tool" = initcheck ] && echo 1) \
      shards "$tool ${op}_test" 'OnDevice.*:*_cuda_fuzz.*:*_cuda_cases.*_f32:*_cuda_cases.*_bf16' \
      "$sanitizer" --tool "$tool" --error-exitcode 1 --print-limit 4 "$folder/${op}_test"
  done
}

# The PyTorch suite on CUDA tensors.
torch_suite() {
  [ -d "$here/site" ] || return 0
  PYTHONPATH=$here/site run "PyTorch suite" "${PULLBACK_PYTHON:-python3}" -m pytest -q --tb=short \
    -p no:cacheprovider "$here/python_tests" -k cuda
}

compile
case $what in
  suite) suite ;;
  torch) torch_suite ;;
  memcheck | initcheck | racecheck | synccheck) sanitize "$what" ;;
  all)
    suite
    torch_suite
    for tool in memcheck racecheck initcheck synccheck; do sanitize $tool; done
    ;;
  *)
    echo "usage: gpu_test.sh [all|suite|torch|memcheck|racecheck|initcheck|synccheck] [OP ...]" >&2
    exit 2
    ;;
esac
exit $failed
