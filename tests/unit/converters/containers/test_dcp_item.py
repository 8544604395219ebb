"""DCP items: torch opens what we build, we open what torch.save writes, byte for byte."""

import io
import zipfile
from zlib import crc32

import pytest
import torch

from converters.common.dtypes import DTYPES
from converters.common.errors import CheckpointError, UnsupportedError
from converters.containers.dcp_item import (
    blob_item,
    item_layout,
    item_pieces,
    item_shell,
    read_blob_item,
    read_item,
)
from converters.containers.tensor_pickle import dump_tensor, load_tensors
from tests.unit.converters.samples import raw

SHAPES = [(), (0,), (3, 0), (1,), (2, 3), (5, 1, 2)]


def sample(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    torch_dtype = getattr(torch, dtype)
    count = torch.Size(shape).numel() * torch_dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=torch_dtype)
    return (torch.arange(count, dtype=torch.uint8) % 2).view(torch_dtype).reshape(shape)


def open_item(data: bytes):
    return read_item(lambda offset, length: data[offset : offset + length], len(data), what="it")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_loads_our_items(dtype, shape, streamed):
    tensor = sample(dtype, shape)
    values = raw(tensor)
    (_, head), (_, tail) = item_pieces(dtype, shape, lambda: crc32(values), streamed=streamed)
    data = head + values + tail
    layout = item_layout(dtype, shape, streamed=streamed)
    assert (layout.total_bytes, layout.data_offset, layout.data_bytes) == (len(data), len(head), len(values))
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.is_contiguous()) == (tensor.dtype, tensor.shape, True)
    assert raw(loaded) == values
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_we_read_torchs_items(dtype, shape):
    tensor = sample(dtype, shape)
    out = io.BytesIO()
    torch.save(tensor, out)
    data = out.getvalue()
    item = open_item(data)
    assert (item.dtype, item.shape) == (dtype, shape)
    assert data[item.data_offset :][: len(raw(tensor))] == raw(tensor)
    offset, length = item.record
    assert item.crc32 in (None, crc32(data[offset : offset + length]))


def test_views_parameters_and_strides_are_read():
    base = torch.arange(24).reshape(4, 6)
    for tensor in (base[1:, 2:4], base.t(), torch.nn.Parameter(base.float())):
        out = io.BytesIO()
        torch.save(tensor, out)
        item = open_item(out.getvalue())
        assert (item.shape, item.strides) == (tuple(tensor.shape), tensor.stride())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1).expand(1 << 20, 1 << 20), "overlap"),
        (torch.zeros(4).as_strided((3, 2), (1, 1)), "overlap"),
        (5, "not a tensor"),
        (torch.eye(3).to_sparse(), "holds a sparse tensor, which is not covered"),
        (torch.zeros(2, dtype=torch.float8_e8m0fnu), "float8_e8m0fnu, which is not covered"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "metadata"),
    ],
)
def test_what_is_no_plain_tensor_is_refused(value, message):
    out = io.BytesIO()
    torch.save(value, out)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        open_item(out.getvalue())


@pytest.mark.parametrize("num_elements", [1, 3])
def test_a_tensor_beyond_its_storage_is_refused(num_elements):
    pickled = dump_tensor("float32", (4,)).replace(b"J\x04\0\0\0", b"J%c\0\0\0" % num_elements, 1)
    with pytest.raises(CheckpointError, match=f"over a storage of {4 * num_elements} bytes"):
        load_tensors(pickled, what="it")


VALUES = [
    1,
    -5,
    2**80,
    2.5,
    None,
    True,
    "ü",
    b"a\xff\x00",
    [1, (2, {"a": {3}})],
    {},
    {"lr": 1e-3, "betas": (0.9, 0.95)},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_blobs_mean_the_same_to_torch_and_to_us(value):
    data = blob_item(value)
    assert torch.load(io.BytesIO(data), weights_only=True) == value
    assert read_blob_item(data) == value
    out = io.BytesIO()
    torch.save(value, out)
    assert read_blob_item(out.getvalue()) == value


@pytest.mark.parametrize(
    "value", [object(), torch.zeros(2), {"a": torch.Size([1])}, [len], 1j], ids=lambda v: type(v).__name__
)
def test_only_plain_values_become_blobs(value):
    with pytest.raises(CheckpointError, match="plain values"):
        blob_item(value)


def test_a_tensor_is_not_decoded_as_a_blob():
    out = io.BytesIO()
    torch.save({"rng": torch.zeros(3)}, out)
    with pytest.raises(CheckpointError, match="refused"):
        read_blob_item(out.getvalue())


def test_a_damaged_pickle_is_found_by_its_crc():
    data = bytearray(blob_item("a long enough text"))
    data[data.index(b"long")] ^= 1
    with pytest.raises(CheckpointError, match="CRC32"):
        read_blob_item(bytes(data))


def test_zip64_item_is_mapped_by_torch(tmp_path):
    shape = (1 << 32,)  # 4 GiB of uint8, sparse on disk
    head, tail = item_shell("uint8", shape, 0)
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(head) + shape[0] - 1)
        file.write(b"\x2a" + tail)
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded.shape == shape
    assert loaded[-1] == 42
