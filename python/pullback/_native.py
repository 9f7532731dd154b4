"""pullback.h through ctypes: the library, its structs, its errors, and the ops' tables of fields.

Nothing here knows an array library: tensors are a `Spec` at plan time and an address at run time.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from typing import Any, NamedTuple, NoReturn

# ---------------------------------------------------------------- the library


def library_path() -> str:
    """PULLBACK_LIBRARY, or the library that the package carries."""
    if named := os.environ.get("PULLBACK_LIBRARY"):
        return named
    # An editable install's package is in two folders, the sources' and the one installed.
    folders = sys.modules[__package__].__path__
    paths = [os.path.join(folder, "lib", "libpullback.so") for folder in folders]
    return next(filter(os.path.exists, paths), paths[0])


_lib = ctypes.CDLL(library_path())
_lib.pullback_last_error.restype = c_char_p


class DeviceError(RuntimeError):
    """The driver, the kernel compiler or the system failed, or memory ran out."""


class InternalError(RuntimeError):
    """A defect of Pullback."""


_ERRORS: dict[int, type[Exception]] = {
    1: ValueError,
    2: NotImplementedError,
    3: ValueError,
    4: DeviceError,
    5: InternalError,
}


def _text(value: bytes | None) -> str:
    # Paths in it may be anything.
    return (value or b"").decode(errors="backslashreplace")


def _fail(status: int) -> NoReturn:
    raise _ERRORS.get(status, InternalError)(_text(_lib.pullback_last_error()))


def function(name: str, *argtypes: Any) -> Any:
    """A function that returns a status, as one that raises."""
    raw = getattr(_lib, name)
    raw.argtypes = argtypes
    raw.restype = c_int32

    def call(*arguments: Any) -> None:
        status = raw(*arguments)
        if status:
            _fail(status)

    return call


def version() -> str:
    number = _lib.pullback_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def describe_system() -> str:
    text = c_char_p()
    _describe_system(byref(text))
    return _text(text.value)


_describe_system = function("pullback_describe_system", POINTER(c_char_p))

# ---------------------------------------------------------------- tensors


class Spec(NamedTuple):
    """Dtype ("f32"), shape and strides (in elements) of a tensor without its data."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Device(NamedTuple):
    kind: int  # DLPack's: 1 the CPU, 2 CUDA
    ordinal: int


CPU = Device(1, 0)

_DTYPES = {
    "f64": (2, 64),
    "f32": (2, 32),
    "bf16": (4, 16),
    "f16": (2, 16),
    "i64": (0, 64),
    "i32": (0, 32),
    "u8": (1, 8),
    "bool": (6, 8),
}
_DTYPE_NAMES = {code: name for name, code in _DTYPES.items()}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def _dl_tensor(spec: Spec, device: Device) -> _DLTensor:
    code, bits = _DTYPES[spec.dtype]
    rank = len(spec.shape)
    numbers = c_int64 * max(rank, 1)
    return _DLTensor(
        None, *device, rank, code, bits, 1, numbers(*spec.shape), numbers(*spec.strides), 0
    )


# ---------------------------------------------------------------- ops

_KINDS = {
    "tensor": POINTER(_DLTensor),
    "layout": c_void_p,
    "i64": c_int64,
    "i32": c_int32,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "f64": c_double,
    "f64?": POINTER(c_double),
}
# What forward passes write.
_RESULTS = frozenset("out lse y c tau support support_size arg arg_mask".split())
_INTEGERS = ("i64", "i32", "u32", "u64")


class Op:
    """One op of pullback.h: the fields of its problem struct, in order, with their defaults."""

    def __init__(self, name: str, *fields: tuple[str, str, Any], passes: bool = True) -> None:
        self.name = name
        self.fields = fields
        self.tensors = tuple(field for field, kind, _ in fields if kind == "tensor")
        self.options = tuple(field for field, kind, _ in fields if kind != "tensor")
        self.problem = type(
            f"{name}_problem",
            (ctypes.Structure,),
            {
                "_fields_": [("struct_size", c_size_t)]
                + [(field, _KINDS[kind]) for field, kind, _ in fields]
            },
        )
        # The struct of a run is its size and one pointer for each tensor.
        words = struct.Struct(f"{1 + len(self.tensors)}N")
        self.tensors_size = words.size
        self.pack = words.pack
        pass_type = (c_int32,) if passes else ()
        self.plan = function(
            f"pullback_{name}_plan",
            POINTER(self.problem),
            *pass_type,
            POINTER(_PlanOptions),
            POINTER(c_void_p),
        )
        self.run = getattr(_lib, f"pullback_{name}_run")
        self.run.argtypes = (c_void_p, c_void_p, c_char_p, c_void_p, c_size_t)
        self.run.restype = c_int32
        self.passes = passes

    def writes(self, direction: int, name: str) -> bool:
        """Whether that pass writes the tensor, if it is given."""
        if not self.passes:
            return name in ("permutation", "offsets")
        if direction == FORWARD:
            return name in _RESULTS
        return name.startswith("d_") and name[2:] not in _RESULTS


class _PlanOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("threads", c_int32),
        ("flags", ctypes.c_uint32),
        ("variant", c_char_p),
    ]


def _tensors(names: str) -> tuple[tuple[str, str, Any], ...]:
    return tuple((name, "tensor", None) for name in names.split())


ATTENTION = Op(
    "attention",
    *_tensors("q k v bias cu_seqlens_q cu_seqlens_k out lse d_out d_lse d_q d_k d_v d_bias"),
    ("max_seqlen_q", "i64", 0),
    ("max_seqlen_k", "i64", 0),
    ("scale", "f64?", None),
    ("softcap", "f64", 0.0),
    ("mask_left", "i64", -1),
    ("mask_right", "i64", -1),
    ("mask_corner", "i32", 0),
    ("flags", "u32", 0),
    ("dropout", "f64", 0.0),
    ("dropout_seed", "u64", 0),
    ("layout", "layout", None),
    ("layout_batches", "i64", 0),
    ("block", "i64", 0),
    *_tensors("seed"),
)
BLOCK_SOFTMAX = Op(
    "block_softmax",
    ("layout", "layout", None),
    ("block", "i64", 0),
    *_tensors("x rpe key_padding_mask attn_mask y d_y d_x d_rpe d_key_padding_mask d_attn_mask"),
    ("key_padding_mode", "i32", 0),
    ("attn_mask_mode", "i32", 1),
    ("scale", "f64", 1.0),
)
BLOCK_MATMUL = Op(
    "block_matmul",
    ("layout", "layout", None),
    ("block", "i64", 0),
    *_tensors("a b c d_c d_a d_b"),
    ("mode", "i32", 0),
    ("flags", "u32", 0),
)
ENTMAX = Op(
    "entmax",
    *_tensors("x alpha_per_row mask offsets y tau support support_size d_y d_x d_alpha"),
    ("alpha", "f64", 2.0),
    ("axis", "i32", -1),
    ("flags", "u32", 0),
)
SEGMENT = Op(
    "segment",
    *_tensors("x offsets ids permutation out arg arg_mask d_out d_x"),
    ("num_segments", "i64", 0),
    ("reduce", "i32", 0),
    ("ties", "i32", 0),
    ("empty", "i32", 0),
    ("flags", "u32", 0),
    *_tensors("lse"),
)
SEGMENT_PERMUTATION = Op(
    "segment_permutation",
    *_tensors("ids permutation offsets"),
    ("num_segments", "i64", 0),
    passes=False,
)
OPS = {
    op.name: op
    for op in (
        ATTENTION,
        BLOCK_SOFTMAX,
        BLOCK_MATMUL,
        ENTMAX,
        SEGMENT,
        SEGMENT_PERMUTATION,
    )
}

FORWARD, BACKWARD = 0, 1

# Bits of the fields called flags.
NONDETERMINISTIC = 1
CHECK_INDICES = 2
TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_C = 1, 2, 4

# ---------------------------------------------------------------- plans

WORKSPACE_ALIGNMENT = 256
SMALL_WORKSPACE = 1 << 20


class _ThreadMemory(threading.local):
    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(SMALL_WORKSPACE + WORKSPACE_ALIGNMENT)
        self.address = align(ctypes.addressof(self.memory))


def align(address: int) -> int:
    return -(-address // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


# Of SMALL_WORKSPACE bytes, for calls on the CPU: to allocate them for each, and have the pages come
# and go, can take longer than a small call.
thread_memory = _ThreadMemory()

_plan_destroy = _lib.pullback_plan_destroy
_plan_destroy.argtypes = (c_void_p,)
_plan_destroy.restype = None
_plan_workspace_bytes = function("pullback_plan_workspace_bytes", c_void_p, POINTER(c_size_t))
_plan_describe = function("pullback_plan_describe", c_void_p, POINTER(c_char_p))
_plan_tensor = function("pullback_plan_tensor", c_void_p, c_char_p, POINTER(_DLTensor))


class NativePlan:
    """A checked problem of an op, bound to the implementation that computes it. Immutable: any
    number of threads may run one plan, each with its own workspace and outputs."""

    def __init__(
        self,
        op: Op,
        direction: int,
        specs: Mapping[str, Spec | None],
        options: Mapping[str, Any],
        device: Device = CPU,
        threads: int = 0,
        variant: str | None = None,
    ) -> None:
        """`options` are the problem's fields that are not tensors; a layout is a BlockLayout."""
        self.op = op
        self.direction = direction
        self._handle = None
        unknown = [name for name in specs if name not in op.tensors]
        unknown += [name for name in options if name not in op.options]
        if unknown:
            raise TypeError(f"{op.name} has no {', '.join(unknown)}")
        problem = op.problem()
        problem.struct_size = ctypes.sizeof(problem)
        for name, kind, default in op.fields:
            value: Any = specs.get(name) if kind == "tensor" else options.get(name, default)
            if value is None:
                if default is not None:
                    raise ValueError(f"{op.name}: {name}: expected a number, got None")
                continue
            if kind == "tensor":
                value = ctypes.pointer(_dl_tensor(value, device))
            elif kind == "layout":
                value = value.handle
            elif kind == "f64?":
                value = ctypes.pointer(c_double(value))
            setattr(problem, name, value)
            # ctypes keeps the low bits of what does not fit.
            if kind in _INTEGERS and getattr(problem, name) != value:
                raise ValueError(
                    f"{op.name}: {name}: expected a number that fits {kind}, got {value}"
                )
        if not hasattr(threads, "__index__"):
            raise TypeError(f"{op.name}: threads: expected an integer, got {threads!r}")
        if not isinstance(variant, (str, type(None))):
            raise TypeError(f"{op.name}: variant: expected a name, got {variant!r}")
        chosen = _PlanOptions(0, *device, threads, 0, (variant or "").encode())
        chosen.struct_size = ctypes.sizeof(chosen)
        if chosen.threads != threads:
            raise ValueError(f"{op.name}: threads: expected a number that fits i32, got {threads}")
        handle = c_void_p()
        arguments = (byref(problem), direction) if op.passes else (byref(problem),)
        op.plan(*arguments, byref(chosen), byref(handle))
        self._handle = handle.value
        size = c_size_t()
        _plan_workspace_bytes(self._handle, byref(size))
        self.workspace_bytes: int = size.value

    def __del__(self) -> None:
        if self._handle:
            _plan_destroy(self._handle)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.op.name}: a plan cannot be copied: make one of the same problem")

    def describe(self) -> str:
        """Op, pass, variant, tiles, accumulation type, guarantee, and why it was chosen."""
        text = c_char_p()
        _plan_describe(self._handle, byref(text))
        return _text(text.value)

    def spec(self, name: str) -> Spec | None:
        """The layout of a tensor, defaults filled in: what to allocate for an output."""
        tensor = _DLTensor()
        _plan_tensor(self._handle, name.encode(), byref(tensor))
        if tensor.ndim < 0:
            return None
        dtype = _DTYPE_NAMES[tensor.code, tensor.bits]
        return Spec(dtype, tuple(tensor.shape[: tensor.ndim]), tuple(tensor.strides[: tensor.ndim]))

    def run_pointers(
        self, pointers: Sequence[int], stream: int, workspace: int, workspace_bytes: int
    ) -> None:
        """Computes. `pointers` are those of op.tensors in their order, 0 for what is not given."""
        op = self.op
        packed = op.pack(op.tensors_size, *pointers)
        status = op.run(self._handle, stream, packed, workspace, workspace_bytes)
        if status:
            _fail(status)
