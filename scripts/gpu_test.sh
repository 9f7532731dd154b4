#!/usr/bin/env bash
# The whole suite on a GPU, then cases that launch every kernel (kernel_cover) under each tool of
# compute-sanitizer. Runs in a checkout that was built, or in a folder made by gpu_pack.sh.
#   gpu_test.sh [all|suite|huge|torch|memcheck|racecheck|initcheck|synccheck] [OP ...]
# With OP, only the tests of these ops. "huge", which "all" leaves out, is of tensors of more than 2^31
# elements and takes up to 60 GB on both sides. "torch" needs a folder made by gpu_pack.sh, and a python3
# with PyTorch; PULLBACK_PYTHON names it. PULLBACK_JOBS processes (all cores) share the tests; one that
# takes more than PULLBACK_LIMIT seconds (300; huge 1800) is ended, and its tests are named.
# Beside an H200 and with 16 processes, memcheck, initcheck and synccheck take about a minute each,
# racecheck, at 10 s a case, about five; the kernels compile before that in one more.
set -uo pipefail
shopt -s lastpipe  # `failed` outlives the pipes
here=$(cd "$(dirname "$0")" && pwd)
what=${1:-all}
shift || true
jobs=${PULLBACK_JOBS:-$(nproc)}
export limit=${PULLBACK_LIMIT:-300} folder logs
if [ -d "$here/bin" ]; then
  folder=$here/bin pullback=$here/bin/pullback
  export LD_LIBRARY_PATH=$here/bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  folder=$here/../build/tests pullback=$here/../build/tools/pullback/pullback
fi
fake=$folder/fake_cuda
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
  wheel=$("${PULLBACK_PYTHON:-python3}" -c 'import nvidia.cu13 as m; print(list(m.__path__)[0])' 2>/dev/null)/lib
  if [ -e "$wheel/libnvrtc.so.13" ]; then export PULLBACK_NVRTC=$wheel; fi
fi
if ! nvidia-smi -L; then
  echo "gpu_test.sh: no GPU here" >&2
  exit 3
fi
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
failed=0

# Before processes side by side would each compile the same kernels.
compile() {
  local arch pattern
  arch=sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  pattern=$(IFS='|'; echo "^(${ops[*]})")
  case " ${ops[*]} " in *" cuda "*) pattern=. ;; esac
  "$pullback" compile --arch "$arch" --match "$pattern" >/dev/null 2>&1 || echo "not compiled ahead" >&2
}

# OP FILTER: the names of its tests.
tests_of() {
  "$folder/$1_test" --gtest_list_tests --gtest_filter="$2" |
    awk '/^[^ ]/ { suite = $1 } /^ / { print suite $1 }'
}

# OP COUNT: a line OP TEST:TEST:… for each so many names on standard input.
lines_of() {
  xargs -r -n "$2" | tr ' ' : | sed "s/^/$1 /"
}

# NUMBER LINE COMMAND...: a process of a pool.
one() {
  local log=$logs/$1 op=${2%% *} tests=${2#* } status
  shift 2
  timeout -k 5 "$limit" "$@" "$folder/${op}_test" --gtest_brief=1 --gtest_filter="$tests" >"$log" 2>&1
  status=$?
  case $status in
    0) ;;
    124 | 137) echo "no end in $limit s: $tests" >"$log.bad" ;;
    *)
      {
        echo "status $status: $tests"
        grep -vE '^\[ RUN|^\[       OK|^\[-----|^\[=====|SKIPPED|PASSED|SUMMARY: 0|^Running|^Note|^$|^=========$' \
          "$log" | head -20
      } >"$log.bad"
      ;;
  esac
}
export -f one

# NAME COMMAND...: runs what each line on standard input names in a process of its own.
pool() {
  local name=$1 start=$SECONDS number=0 line passed
  shift
  logs=$(mktemp -d)
  while read -r line; do printf '%s\0%s\0' $((number++)) "$line"; done |
    xargs -0 -r -n 2 -P "$jobs" bash -c 'one "${@: -2}" "${@:1:$#-2}"' _ "$@"
  passed=$(cat "$logs"/* 2>/dev/null | sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?\./\1/p' | awk '{ n += $1 } END { print n + 0 }')
  if [ "$passed" = 0 ] || compgen -G "$logs/*.bad" >/dev/null; then
    echo "FAILED  $name, $((SECONDS - start)) s: $passed tests passed"
    cat "$logs"/*.bad 2>/dev/null | head -80
    [ "$passed" != 0 ] || echo "no test ran, or all were skipped"
    failed=1
  else
    echo "passed  $name, $((SECONDS - start)) s: $passed tests"
  fi
  rm -rf "$logs"
}

suite() {
  local op
  for op in "${ops[@]}"; do
    if [ "$op" = cuda ]; then
      tests_of cuda '-budgets.*' | lines_of cuda 1
    else
      tests_of "$op" '*cuda*' | shuf --random-source=<(yes) | lines_of "$op" 12
    fi
  done | pool suite
}

huge() {
  export PULLBACK_HUGE_TESTS
  limit=${PULLBACK_LIMIT:-1800}
  for PULLBACK_HUGE_TESTS in "${ops[@]}"; do
    [ "$PULLBACK_HUGE_TESTS" != cuda ] || PULLBACK_HUGE_TESTS=all
    tests_of cuda '*.tensors_of_more_than_2_to_the_31_elements' | lines_of cuda 1 | pool "huge $PULLBACK_HUGE_TESTS"
  done
}

# Kernels are tens of times slower under a sanitizer, and most of all under racecheck.
cases=
sanitize() {
  local tool=$1 count=4 op
  if [ -z "$cases" ] && ! cases=$(LD_LIBRARY_PATH=$fake:${LD_LIBRARY_PATH:-} PULLBACK_NVRTC=$fake \
    PULLBACK_CACHE=off "$folder/kernel_cover"); then
    echo "FAILED  $tool: no list of cases"
    failed=1
    return
  fi
  [ "$tool" = racecheck ] && count=1
  for op in "${ops[@]}"; do
    if [ "$op" = cuda ]; then
      tests_of cuda 'OnDevice.*:OnDeviceToolkit.*' | lines_of cuda 4
    else
      grep "^$op/" <<<"$cases" | lines_of "$op" $count
      tests_of "$op" '*_cuda_fuzz.*:*_cuda.hostile_*:*cuda_cases*out_of_order*:*cuda_cases*cut_short*' | lines_of "$op" 1
    fi
  done | PULLBACK_FUZZ_COUNT=8 PULLBACK_RAW_WORKSPACE=$([ "$tool" = initcheck ] && echo 1) \
    pool "$tool" "$sanitizer" --tool "$tool" --error-exitcode 1 --print-limit 4
}

# The PyTorch suite on CUDA tensors, shared by processes.
torch_suite() {
  if [ ! -d "$here/site" ]; then
    echo "gpu_test.sh: no PyTorch suite here: make a folder with gpu_pack.sh" >&2
    [ "$what" = all ] || failed=1
    return 0
  fi
  local start=$SECONDS passed
  logs=$(mktemp -d)
  export PYTHONPATH=$here/site
  export pytest="${PULLBACK_PYTHON:-python3} -m pytest -q --rootdir=. --tb=short -p no:cacheprovider"
  cd "$here/python_tests" || exit
  $pytest --collect-only -k cuda . | sed -n 's/.*python_tests\///; /::/p' >"$logs/all"
  shuf --random-source=<(yes) "$logs/all" | split -n "r/$jobs" - "$logs/part."
  printf '%s\0' "$logs"/part.* | xargs -0 -P "$jobs" -I{} bash -c \
    '[ ! -s {} ] || xargs -d "\n" -a {} timeout "$limit" $pytest >{}.log 2>&1 || mv {}.log {}.bad'
  passed=$(cat "$logs"/part.*.log | sed -nE 's/^([0-9]+) passed.*/\1/p' | awk '{ n += $1 } END { print n + 0 }')
  if [ ! -s "$logs/all" ] || compgen -G "$logs/*.bad" >/dev/null; then
    echo "FAILED  PyTorch suite, $((SECONDS - start)) s"
    tail -n 40 "$logs"/*.bad
    failed=1
  else
    echo "passed  PyTorch suite, $((SECONDS - start)) s: $passed of $(wc -l <"$logs/all") tests, the others skipped"
  fi
  rm -rf "$logs"
  cd - >/dev/null || exit
}

compile
case $what in
  suite) suite ;;
  huge) huge ;;
  torch) torch_suite ;;
  memcheck | initcheck | racecheck | synccheck) sanitize "$what" ;;
  all)
    suite
    torch_suite
    for tool in memcheck racecheck initcheck synccheck; do sanitize $tool; done
    ;;
  *)
    echo "usage: gpu_test.sh [all|suite|huge|torch|memcheck|racecheck|initcheck|synccheck] [OP ...]" >&2
    exit 2
    ;;
esac
exit $failed
