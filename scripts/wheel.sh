#!/usr/bin/env bash
# Makes the wheel of a finished build, in BUILD/python/wheel, with compiled kernels for common GPUs in it.
#   wheel.sh BUILD [REGEX]
# REGEX names the kernels; scripts/wheel_kernels.txt does when it is not given. For other machines too if
# the build is portable (no PULLBACK_NATIVE). PYTHON is the interpreter whose pip makes the wheel. Compiled
# kernels stay in BUILD/python/compiled: the next wheel compiles those whose sources have changed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
build=$1 match=${2:-$(grep -v '^#' scripts/wheel_kernels.txt | paste -sd '|')}
folder=$PWD/$build/python
kernels=$folder/kernels wheels=$folder/wheel
most=15000000

need_nvrtc "$build"
rm -rf "$kernels" "$wheels"
export PULLBACK_CACHE=rw PULLBACK_CACHE_DIR=$folder/compiled
compile=("$build/tools/pullback/pullback" compile --arch sm_80,sm_90 --match "$match")
"${compile[@]}"
"${compile[@]}" --output "$kernels" >/dev/null
"${PYTHON:-python3}" scripts/pool_kernels.py "$kernels"
"${PYTHON:-python3}" -m pip wheel -q --disable-pip-version-check . --no-deps -w "$wheels" \
  -C cmake.define.PULLBACK_BUILD="$PWD/$build" -C cmake.define.PULLBACK_KERNELS="$kernels"
wheel=$(ls "$wheels"/*.whl)
# pip compresses for speed; the most that deflate can do is 2 % less.
"${PYTHON:-python3}" - "$wheel" <<'END'
import os, sys, zipfile
wheel = sys.argv[1]
with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(wheel + ".small", "w") as new:
    for entry in old.infolist():
        new.writestr(entry, old.read(entry), zipfile.ZIP_DEFLATED, compresslevel=9)
os.replace(wheel + ".small", wheel)
END
size=$(stat -c %s "$wheel")
echo "$wheel: $((size / 1024)) KiB"
if [ "$size" -gt "$most" ]; then
  echo "wheel.sh: the wheel is larger than $((most / 1000000)) MB" >&2
  exit 1
fi
