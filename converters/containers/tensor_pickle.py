"""Read and write torch's pickles of tensors without torch; a tensor is read as a reference into a storage."""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from converters.common.box import TensorInfo
from converters.common.dtypes import BY_TORCH_STORAGE, DTYPES, itemsize
from converters.common.errors import CheckpointError, UnsupportedError
from converters.containers.safe_pickle import PLAIN_STUBS, PlainDict, RefusedClass, Sealed, Stubs, safe_load

# torch's element types that are not plain numbers of whole bytes, or that cannot be converted
UNCOVERED_DTYPES = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
    *("float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "bcomplex32", "complex32"),
)


_OF_TORCHAO = re.compile(rb"ctorchao(?:\.\w+)*\n(\w+)\n")  # a class in a pickle of protocol 2, which torch writes


@dataclass(frozen=True, slots=True)
class StorageType:
    """A typed storage class of torch, by dtype name; "" is UntypedStorage, which counts in bytes."""

    dtype: str


@dataclass(frozen=True, slots=True)
class DTypeName:
    """A torch dtype in a pickle."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage record of the archive: `key` is its entry under `data/`."""

    dtype: str
    key: str
    num_elements: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as strides over a storage; offset and strides in elements."""

    dtype: str
    storage: Storage
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _RebuildV2(metaclass=Sealed):
    def __new__(cls, storage, offset, size, strides, requires_grad, hooks, metadata=None):  # type: ignore[no-untyped-def]
        return _tensor_ref(storage, offset, size, strides, storage.dtype, hooks, metadata)


class _RebuildV3(metaclass=Sealed):
    def __new__(cls, storage, offset, size, strides, requires_grad, hooks, dtype, metadata=None):  # type: ignore[no-untyped-def]
        if dtype.name in UNCOVERED_DTYPES:
            raise UnsupportedError(f"a tensor of the element type {dtype.name}, which is not covered")
        return _tensor_ref(storage, offset, size, strides, dtype.name, hooks, metadata)


class _RebuildParameter(metaclass=Sealed):
    def __new__(cls, data, requires_grad, hooks):  # type: ignore[no-untyped-def]
        if not isinstance(data, TensorRef) or hooks:
            raise ValueError("a parameter around something that is not a tensor")
        return data


class ByteStream(metaclass=Sealed):
    """Stub of io.BytesIO, in which Transformer Engine keeps the state of a module; `data`: its bytes."""

    __slots__ = ("data",)

    def __new__(cls) -> "ByteStream":
        stream = super().__new__(cls)
        stream.data = b""  # of a stream that is pickled without a state
        return stream

    def __setstate__(self, state: Any) -> None:
        data, *_ = state
        if not isinstance(data, bytes):
            raise ValueError("a stream of something that is not bytes")
        self.data = data


class _NoBytes(metaclass=Sealed):
    """Stub of `bytes`, which protocol 2 uses for empty ones."""

    def __new__(cls) -> bytes:  # type: ignore[misc]
        return b""


class _PlainTensor(metaclass=Sealed):
    """Stub of torch.Tensor as the class of a tensor."""


class _RebuildFromType(metaclass=Sealed):
    """A tensor with attributes: FSDP1 adds them to those of a full state dict. They are left out."""

    def __new__(cls, rebuild, kind, arguments, attributes):  # type: ignore[no-untyped-def]
        if kind is not _PlainTensor or rebuild not in (_RebuildV2, _RebuildV3):
            raise UnsupportedError("a tensor of a custom class, which is not covered")
        return rebuild(*arguments)


_DTENSOR = RefusedClass(
    "a DTensor, of which a file has only one rank's part",
    "the other ranks' parts are in files of their own, or were never written (adapters saved by Accelerate before "
    "1.15: use adapter_model.safetensors of the same folder); in the job that saved it, save with FULL_STATE_DICT or "
    "dcp.save",
)
TENSOR_STUBS: Stubs = {
    ("collections", "OrderedDict"): PlainDict,
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildV2,
    ("torch._utils", "_rebuild_tensor_v3"): _RebuildV3,
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter,
    ("torch.storage", "UntypedStorage"): StorageType(""),
    ("torch", "Size"): tuple,
    **{("torch", storage): StorageType(name) for storage, name in BY_TORCH_STORAGE.items()},
    **{("torch", name): DTypeName(name) for name in (*DTYPES, *UNCOVERED_DTYPES)},
    **{
        ("torch._utils", name): RefusedClass(f"a {kind} tensor")
        for name, kind in (
            ("_rebuild_sparse_tensor", "sparse"),
            ("_rebuild_nested_tensor", "nested"),
            ("_rebuild_qtensor", "quantized"),
            ("_rebuild_wrapper_subclass", "wrapped (DTensor, or quantized)"),
            ("_rebuild_meta_tensor_no_storage", "meta (without values)"),
            ("_rebuild_device_tensor_from_numpy", "foreign device's"),
        )
    },
    ("_io", "BytesIO"): ByteStream,
    ("__builtin__", "bytes"): _NoBytes,
    ("torch", "Tensor"): _PlainTensor,
    ("torch._tensor", "_rebuild_from_type_v2"): _RebuildFromType,
    ("torch.distributed.tensor", "DTensor"): _DTENSOR,
}


def load_tensors(data: bytes, *, what: str) -> Any:
    """The value of a torch.save `data.pkl` with a TensorRef in place of each tensor."""
    try:
        return safe_load(data, {**PLAIN_STUBS, **TENSOR_STUBS}, what=what, persistent=_storage)
    except UnsupportedError:
        if match := _OF_TORCHAO.search(data):
            raise UnsupportedError(
                f"{what}: quantized by torchao ({match[1].decode()}), which is not covered",
                hint="its codes and scales are of one rank's part, and .metadata says only what they stand for; "
                "leave it out, or dequantize it and save again",
            ) from None
        if b"torch.distributed.tensor\nDTensor\n" in data:  # its rebuilding function stands in front of it
            raise UnsupportedError(f"{what}: holds {_DTENSOR.what}, which is not covered", hint=_DTENSOR.hint) from None
        raise


def _storage(pid: Any) -> Storage:
    kind, storage_type, key, _location, num_elements = pid
    key = str(key) if type(key) is int else key  # litgpt's
    plain = isinstance(storage_type, StorageType) and isinstance(key, str) and type(num_elements) is int
    if kind != "storage" or not plain or num_elements < 0:
        raise ValueError("a storage of an unknown kind")
    return Storage(storage_type.dtype, key, num_elements)


def _tensor_ref(storage: Any, offset: Any, size: Any, strides: Any, dtype: str, hooks: Any, metadata: Any) -> TensorRef:
    if not isinstance(storage, Storage) or hooks or metadata:
        raise ValueError("a tensor with hooks or metadata")
    shape, strides = tuple(size), tuple(strides)
    if any(type(n) is not int or n < 0 for n in (offset, *shape, *strides)) or len(shape) != len(strides):
        raise ValueError(f"a tensor of shape {shape}, strides {strides}, offset {offset}")
    width = itemsize(dtype)
    num_bytes = storage.num_elements * (itemsize(storage.dtype) if storage.dtype else 1)
    if 0 in shape:
        return TensorRef(dtype, storage, 0, shape, row_major(shape))
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if (last + 1) * width > num_bytes:
        raise ValueError(f"a tensor of shape {shape} and strides {strides} over a storage of {num_bytes} bytes")
    # Strides that overlap let a kilobyte claim to be a terabyte (torch.zeros(1).expand(...)).
    span = 1
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < span:
            raise ValueError(f"a tensor of shape {shape} whose strides {strides} overlap")
        span = stride * n
    return TensorRef(dtype, storage, offset, shape, strides)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array of `shape`."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def dump_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The `data.pkl` of torch.save for a contiguous tensor that owns its storage `0`, in the opcodes torch emits."""
    return b"\x80\x02" + _tensor(dtype, shape, "0") + b"."


def dump_tensors(tensors: Mapping[str, TensorInfo], keys: Mapping[str, str]) -> bytes:
    """The `data.pkl` of torch.save for a flat dict of contiguous tensors. `keys`: name → its storage."""
    items = [_text(name) + _tensor(info.dtype, info.shape, keys[name]) for name, info in tensors.items()]
    return b"\x80\x02}(" + b"".join(items) + b"u."


def _tensor(dtype: str, shape: tuple[int, ...], key: str) -> bytes:
    element = DTYPES.get(dtype)
    if element is None:
        raise CheckpointError(f"unknown element type {dtype!r}", hint=f"known: {', '.join(DTYPES)}")
    count = prod(shape)
    typed = bool(element.torch_storage)
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n" if typed else b"ctorch._utils\n_rebuild_tensor_v3\n"
    storage = f"ctorch\n{element.torch_storage}\n" if typed else "ctorch.storage\nUntypedStorage\n"
    persistent_id = b"(" + _text("storage") + storage.encode() + _text(key) + _text("cpu")
    persistent_id += _integer(count if typed else count * element.itemsize) + b"tQ"
    layout = _integer(0) + _integers(shape) + _integers(row_major(shape))
    hooks = b"\x89ccollections\nOrderedDict\n)R"  # requires_grad=False, no hooks
    dtype_argument = b"" if typed else f"ctorch\n{dtype}\n".encode()
    return rebuild + b"(" + persistent_id + layout + hooks + dtype_argument + b"tR"


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _integer(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x09" + value.to_bytes(9, "little")


def _integers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"
