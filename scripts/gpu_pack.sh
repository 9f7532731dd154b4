#!/usr/bin/env bash
# Collects what a machine with a GPU, but without compiler and network, needs to test and time
# Pullback: scripts/gpu_pack.sh FOLDER [BUILD [WHEEL]]. There, run gpu_test.sh or gpu_bench.sh in the
# folder. With a release's WHEEL (wheel.sh) they also test the compiled kernels that it carries.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
folder=${1:?usage: scripts/gpu_pack.sh FOLDER [BUILD [WHEEL]]} build=${2:-build} wheel=${3:-.}

mkdir -p "$folder/bin"
programs=("$build"/tools/pullback/pullback "$build"/tests/{cuda_test,kernel_cover})
for path in src/ops/*/cuda; do
  op=$(basename "$(dirname "$path")")
  programs+=("$build/tests/${op}_test")
done
for program in "${programs[@]}"; do
  strip -o "$folder/bin/$(basename "$program")" "$program"
done
# Libraries that other distributions may lack.
ldd "${programs[@]}" | sed -nE 's/.*lib(tbb|hwy|fmt)[^ ]* => ([^ ]+) .*/\2/p' | sort -u |
  while read -r library; do cp -L "$library" "$folder/bin/"; done
cp -R "$build/tests/fake_cuda" "$folder/bin/"
cp scripts/gpu_test.sh scripts/gpu_bench.sh scripts/gpu_{rivals,compare,torch,transformers}.py scripts/{scan,compare_builds}.py tests/cuda/budgets.json "$folder/"
# The Python package, its tests and what runs them; PyTorch is there already.
export PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m pip --version >/dev/null 2>&1 || need_packages python3-pip
python3 -m pip install -q --no-deps --target "$folder/site" "$wheel" -C cmake.define.PULLBACK_BUILD="$PWD/$build"
python3 -m pip install -q --target "$folder/site" "$(grep ^pytest== python/requirements/test.txt)"
mkdir -p "$folder/python_tests"
cp python/tests/torch_cases.py python/tests/test_torch*.py python/tests/test_{compat,sdpa,kernels}.py \
  python/tests/{common_calls.py,fake_cuda.c} "$folder/python_tests/"
du -sh "$folder"
