#!/usr/bin/env bash
# Builds the documentation into build/site and runs its examples. Warnings are errors.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

need_packages "${packages[@]}"
configure build
build build pullback

venv=build/docs-venv
wanted=$(cat docs/requirements.txt python/requirements/*.txt)
if [ "$wanted" != "$(cat "$venv/made-for" 2>/dev/null)" ]; then
  python3 -c 'import ensurepip, venv' 2>/dev/null || need_packages python3-venv
  python3 -m venv --clear "$venv"
  prefer_cpu_torch "$venv/bin/python"
  export PIP_CACHE_DIR=$PWD/build/python/cache  # scripts/python_test.sh's
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -r docs/requirements.txt
  echo "$wanted" >"$venv/made-for"
fi

rm -rf docs/gallery build/site
PULLBACK_LIBRARY=$PWD/build/libpullback.so PYTHONPATH=$PWD/python MPLBACKEND=agg \
  "$venv/bin/python" -m sphinx -q -W --keep-going -d build/docs docs build/site
echo "Documentation: file://$PWD/build/site/index.html"
