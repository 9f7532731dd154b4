#!/usr/bin/env bash
# Times Pullback and its rivals on this machine's GPU, in one run:
#   gpu_bench.sh [OUTPUT FOLDER [options of pullback bench]]
# Leaves bench.json, bench.html, rivals.json and comparison.txt. Runs where gpu_test.sh does; the rivals
# need a python3 with PyTorch and Triton, PULLBACK_PYTHON names it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
output=${1:-bench_results}
shift || true
if [ -d "$here/bin" ]; then
  pullback=$here/bin/pullback
  export LD_LIBRARY_PATH=$here/bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  pullback=$here/../build/tools/pullback/pullback
fi
python=${PULLBACK_PYTHON:-python3}
if [ -z "${PULLBACK_NVRTC:-}" ]; then
  folder=$("$python" -c 'import nvidia.cu13 as m; print(list(m.__path__)[0])' 2>/dev/null || true)/lib
  if [ -e "$folder/libnvrtc.so.13" ]; then export PULLBACK_NVRTC=$folder; fi
fi
mkdir -p "$output"

# Time until a plan is ready: with an empty cache, and with what the first run left there.
PULLBACK_CACHE_DIR=$(mktemp -d)
export PULLBACK_CACHE_DIR
trap 'rm -rf "$PULLBACK_CACHE_DIR"' EXIT
for start in cold warm; do
  while read -r op filter; do
    "$pullback" bench "$op" --device cuda --quick --no-compare --seconds 0.001 --dtype f32 \
      --filter "$filter" --json "$output/plans_${start}_$op.json" >/dev/null || true
  done <<'PROBLEMS'
entmax 8192x32768
segment D=128 mean 4096
block_softmax block 64 S 4096
PROBLEMS
done
"$pullback" bench --device cuda --json "$output/bench.json" --html "$output/bench.html" "$@" |
  tee "$output/bench.txt"
"$python" "$here/gpu_rivals.py" --json "$output/rivals.json" || echo "no rivals: see above" >&2
"$python" "$here/gpu_compare.py" "$output" | tee "$output/comparison.txt"
