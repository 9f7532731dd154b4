#!/usr/bin/env bash
# Builds the documentation into build/site and runs its examples. Warnings are errors.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

need_packages "${packages[@]}"
configure build
build build pullback

venv=build/docs-venv
if ! cmp -s docs/requirements.txt "$venv/requirements.txt"; then
  python3 -c 'import ensurepip' 2>/dev/null || need_packages python3-venv
  python3 -m venv --clear "$venv"
  "$venv/bin/pip" install -q --disable-pip-version-check -r docs/requirements.txt
  cp docs/requirements.txt "$venv/"
fi

rm -rf docs/gallery build/site
PULLBACK_LIBRARY=$PWD/build/libpullback.so PYTHONPATH=$PWD/python MPLBACKEND=agg \
  "$venv/bin/python" -m sphinx -q -W --keep-going -d build/docs docs build/site
echo "Documentation: file://$PWD/build/site/index.html"
