"""Kernels that the wheel carries are found, and are those that common calls need.

A fake driver and a fake compiler let plans for a GPU be made anywhere: they load their kernels, and
nothing computes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pullback
from pullback import _native

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
PATTERNS = CHECKOUT / "scripts" / "wheel_kernels.txt"
BUDGETS = CHECKOUT / "tests" / "cuda" / "budgets.json"
CARRIED = list((Path(_native.library_path()).parent / "kernels").glob("*.pbk"))

PERMUTATION = """
from pullback._native import *
ids = Spec("i64", (1000,), (1,))
NativePlan(SEGMENT_PERMUTATION, FORWARD, {"ids": ids}, {"num_segments": 9}, Device(2, 0))
"""
# Sums of rows of three columns: a kernel for such rows, and one for any.
SUMS = """
from pullback._native import *
specs = {"x": Spec("f32", (64, 3), (3, 1)), "offsets": Spec("i64", (10,), (1,))}
options = {"reduce": 0, "num_segments": 9}
print(NativePlan(SEGMENT, FORWARD, specs, options, Device(2, 0)).describe())
"""
# Calls for which a wheel has kernels, if not the fastest; what is missing is a name or two of each.
SLOWER_CALLS = """
from pullback._native import *
def plan(op, options={}, **shapes):
    specs = {}
    for name, (dtype, *shape) in shapes.items():
        strides = [1]
        for size in shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        specs[name] = Spec(dtype, tuple(shape), tuple(strides))
    text = NativePlan(op, FORWARD, specs, options, Device(2, 0)).describe()
    print(text.partition("slower than it might be")[2].partition(",")[0] or text)
def attend(dtype, queries=2048, options={}, **more):
    heads = {"q": (dtype, 1, queries, 8, 128)}
    heads.update({name: (dtype, 1, 8192, 8, 128) for name in "kv"})
    plan(ATTENTION, options, **heads, **more)
bias = {"bias": ("bf16", 1, 8, 2048, 8192)}
attend("bf16", options={"dropout": 0.1}, **bias)
attend("f16", options={"dropout": 0.1})
attend("bf16", queries=1)
plan(ENTMAX, {"alpha": 1.5, "axis": 0}, x=("f32", 20000, 32))
plan(ENTMAX, {"alpha": 1.5, "axis": 1}, x=("f32", 64, 1001))
for columns in 3, 33:
    offsets = ("i64", 10)
    plan(SEGMENT, {"reduce": 0, "num_segments": 9}, x=("bf16", 64, columns), offsets=offsets)
"""
# Plans for a GPU what PyTorch has on the CPU, and computes nothing.
COMMON_CALLS = """
import pullback.torch._operator as operator
from pullback._native import Device, NativePlan
class Planned(NativePlan):
    def __init__(self, op, direction, specs, options, *device):
        super().__init__(op, direction, specs, options, Device(2, 0))
    def run_pointers(self, *arguments):
        pass
operator.NativePlan = Planned
import common_calls
for call in common_calls.calls("cpu"):
    call.run()
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    for library in ("libcuda.so.1", "libnvrtc.so.13"):
        options = ["-shared", "-fPIC", "-o", str(folder / library)]
        subprocess.run([compiler, *options, str(HERE / "fake_cuda.c")], check=True)
    return folder


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process that cannot compile; a cache would be left in `folder`."""
    own = {
        "LD_LIBRARY_PATH": f"{folder}:{Path(_native.library_path()).parent}",
        "PULLBACK_CACHE_DIR": str(folder / "cache"),
        "PULLBACK_JIT": "off",
        "PULLBACK_NVRTC": "/nowhere",
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=HERE,
        env={**os.environ, **own, **environment},
        timeout=600,
    )


def patterns() -> list[re.Pattern[str]]:
    lines = PATTERNS.read_text().splitlines()
    return [re.compile(line) for line in lines if not line.startswith("#")]


@pytest.mark.skipif(not CARRIED, reason="a wheel without kernels")
def test_kernels_of_the_wheel_are_found(driver: Path) -> None:
    expected = rf"shipped kernels +{len(CARRIED)}, {len(CARRIED)} of them of this version"
    assert re.search(expected, pullback.doctor())
    found = run(PERMUTATION, driver)
    assert found.returncode == 0, found.stderr
    assert not (driver / "cache").exists()
    found = run(PERMUTATION, driver, PULLBACK_CACHE="off")
    assert "not in the cache" in found.stderr


def test_a_slower_kernel_stands_in_for_what_cannot_be_compiled(driver: Path) -> None:
    cache = driver / "some"
    environment = {
        "PULLBACK_CACHE_DIR": str(cache),
        "PULLBACK_LIBRARY": shutil.copy(_native.library_path(), driver),  # no kernels beside it
    }
    best = run(SUMS, driver, PULLBACK_JIT="on", PULLBACK_NVRTC=str(driver), **environment)
    assert best.returncode == 0, best.stderr
    assert "slower" not in best.stdout
    for kernel in "segment_reduce_tile_4_sum_float", "segment_reduce_rows_any_sum_float":
        entries = [path for path in cache.glob("*.pbk") if kernel.encode() in path.read_bytes()]
        assert len(entries) == 1
        entries[0].unlink()
        found = run(SUMS, driver, **environment)
        if "tile" in kernel:
            assert f"slower than it might be: there is no compiler for {kernel}," in found.stdout
            assert "nvidia-cuda-nvrtc" in found.stdout
        else:
            assert f"{kernel} for sm_90 is not in the cache" in found.stderr


@pytest.mark.skipif(len(CARRIED) < 100, reason="not a release's wheel")
def test_slower_kernels_of_the_wheel_serve(driver: Path) -> None:
    found = run(SLOWER_CALLS, driver)
    assert found.returncode == 0, found.stderr
    missed = found.stdout.splitlines()
    assert len(missed) == 7
    for line in missed:
        assert line.startswith(": there is no compiler for "), line


@pytest.mark.skipif(len(CARRIED) < 100, reason="not a release's wheel")
def test_common_calls_compile_nothing(driver: Path) -> None:
    pytest.importorskip("torch")
    found = run(COMMON_CALLS, driver)
    assert found.returncode == 0, found.stderr
    assert not (driver / "cache").exists()


@pytest.mark.skipif(len(CARRIED) < 100, reason="not a release's wheel")
def test_cuda_common_calls_compile_nothing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    # With the machine's own driver.
    found = run("import common_calls as c; raise SystemExit(c.main())", tmp_path)
    print(found.stdout)
    assert found.returncode == 0, found.stdout + found.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(not PATTERNS.exists(), reason="not in a checkout")
def test_patterns_name_what_common_calls_load(driver: Path) -> None:
    pytest.importorskip("torch")
    cache = driver / "all"
    found = run(
        COMMON_CALLS,
        driver,
        PULLBACK_JIT="on",
        PULLBACK_NVRTC=str(driver),
        PULLBACK_CACHE_DIR=str(cache),
        PULLBACK_LIBRARY=shutil.copy(_native.library_path(), driver),  # no kernels beside it
    )
    assert found.returncode == 0, found.stderr
    texts = [path.read_bytes().decode(errors="replace") for path in cache.glob("*.pbk")]
    names = [re.search(r"^name (\w+)$", text, re.MULTILINE)[1] for text in texts]
    assert len(names) > 100
    assert [name for name in names if not any(p.search(name) for p in patterns())] == []


@pytest.mark.skipif(not BUDGETS.exists(), reason="not in a checkout")
def test_patterns_of_the_wheels_kernels_name_some() -> None:
    names = json.loads(BUDGETS.read_text())["kernels"]
    carried = [{name for name in names if pattern.search(name)} for pattern in patterns()]
    assert all(carried)
    ops = {name.split("_")[0] for names in carried for name in names}
    assert ops == {"attention", "block", "entmax", "segment"}
    assert not any("double" in name for names in carried for name in names)
