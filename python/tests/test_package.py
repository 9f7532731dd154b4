"""The package as a whole: what importing costs and touches, and the tables of the C ABI."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pullback
from pullback import _native

HEADERS = Path(__file__).parents[2] / "include" / "pullback" / "c"

C_KINDS = {
    "const DLTensor*": "tensor",
    "const pullback_block_layout*": "layout",
    "int64_t": "i64",
    "int32_t": "i32",
    "uint32_t": "u32",
    "uint64_t": "u64",
    "double": "f64",
    "const double*": "f64?",
}


def c_fields(struct: str) -> list[tuple[str, str]]:
    text = "".join(header.read_text() for header in sorted(HEADERS.glob("*.h")))
    body = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", text, re.DOTALL)
    assert body, struct
    code = re.sub(r"/\*.*?\*/", "", body.group(1), flags=re.DOTALL)
    fields = re.findall(r"([\w ]+?\*?)\s+(\w+);", code)
    return [(name, " ".join(kind.split())) for kind, name in fields]


@pytest.mark.skipif(not HEADERS.exists(), reason="not in a checkout")
@pytest.mark.parametrize("op", _native.OPS.values(), ids=lambda op: op.name)
def test_tables_are_those_of_the_header(op: _native.Op) -> None:
    size, *fields = c_fields(f"pullback_{op.name}_problem")
    assert size == ("struct_size", "size_t")
    assert [(name, C_KINDS[kind]) for name, kind in fields] == [
        (name, kind) for name, kind, _ in op.fields
    ]
    size, *pointers = c_fields(f"pullback_{op.name}_tensors")
    assert tuple(name for name, _ in pointers) == op.tensors


def run(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout


def test_import_is_quick_and_light() -> None:
    code = """
import sys, time
begin = time.process_time()
import pullback
print(time.process_time() - begin)
maps = open("/proc/self/maps").read()
assert "libcuda" not in maps and "libnvrtc" not in maps
assert not {"numpy", "torch", "transformers"} & set(sys.modules)
"""
    assert min(float(run(code)) for _ in range(3)) < 0.1


def test_submodules_are_attributes() -> None:
    run("import pullback; pullback.numpy.attention; import sys; assert 'torch' not in sys.modules")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pullback.nothing  # noqa: B018


def test_doctor_tells_what_is_found_and_missing() -> None:
    text = pullback.doctor()
    for part in ("pullback ", "CPU ", "CUDA ", "NVRTC ", "kernel cache", "libpullback.so", "numpy"):
        assert part in text, text


def test_the_library_is_where_the_package_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PULLBACK_LIBRARY", raising=False)
    library = tmp_path / "installed" / "lib" / "libpullback.so"
    library.parent.mkdir(parents=True)
    library.touch()
    # As an editable install has it: the sources' folder and the installed one.
    for folders in (["sources", "installed"], ["installed", "sources"]):
        monkeypatch.setattr(pullback, "__path__", [str(tmp_path / folder) for folder in folders])
        assert _native.library_path() == str(library)


def test_libraries_beside_ours_are_looked_for_nowhere_else() -> None:
    if not (readelf := shutil.which("readelf")):
        pytest.skip("no readelf")
    command = [readelf, "-d", _native.library_path()]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # An empty element would be the working directory.
    assert re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", dynamic) == ["$ORIGIN"]


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", pullback.__version__)


def test_plans_do_not_leak() -> None:
    spec = _native.Spec("f32", (4, 8), (8, 1))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    def many() -> None:
        for _ in range(2000):
            _native.NativePlan(_native.ENTMAX, _native.FORWARD, {"x": spec}, {})

    many()
    before = resident()
    many()
    assert resident() - before < 256  # pages


def test_a_failed_plan_has_nothing_to_destroy() -> None:
    with pytest.raises(ValueError):
        _native.NativePlan(_native.ENTMAX, _native.FORWARD, {}, {})
    with pytest.raises(TypeError, match="entmax has no z, beta"):
        _native.NativePlan(_native.ENTMAX, _native.FORWARD, {"z": None}, {"beta": 1})


def test_threads_run_at_once() -> None:
    """ctypes lets go of the interpreter lock: a long run does not stop other threads."""
    import threading

    import numpy as np

    import pullback.numpy as pn

    q = np.random.default_rng(0).standard_normal((1, 1024, 4, 64)).astype(np.float32)
    ticks = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(1e-4)

    ticker = threading.Thread(target=tick)
    ticker.start()
    pn.attention(q, q, q, variant="reference", threads=1)
    done.set()
    ticker.join()
    assert len(ticks) > 10


def test_struct_of_a_dl_tensor_is_dlpacks() -> None:
    assert ctypes.sizeof(_native._DLTensor) == 48
