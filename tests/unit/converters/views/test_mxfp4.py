"""converters/views/mxfp4.py and its expression: transformers' values, and the codes of the formula and of torchao."""

import ml_dtypes
import numpy as np
import pytest
import torch

from converters.common.box import Box
from converters.views.expressions import Mxfp4Blocks, Source
from converters.views.mxfp4 import block_amax, decode, encode, scales_rounded_down, scales_rounded_up
from tests.models.gpt_oss import dequantize, quantize
from tests.unit.converters.samples import Arrays

RNG = np.random.default_rng(0)
EVERY_BYTE = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (255, 1, 1))
EVERY_SCALE = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, 1)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint16)


def as_numpy(tensor):
    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def as_torch(array):
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)


def test_every_byte_times_every_scale_is_transformers_value():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = convert_moe_packed_tensors(torch.from_numpy(EVERY_BYTE)[None], torch.from_numpy(EVERY_SCALE)[None])
    found = decode(EVERY_BYTE, EVERY_SCALE, "bfloat16")
    assert np.array_equal(bits(found), bits(as_numpy(theirs[0].T)))
    assert torch.equal(
        as_torch(found).view(torch.int16),
        dequantize(torch.from_numpy(EVERY_BYTE), torch.from_numpy(EVERY_SCALE)).view(torch.int16),
    )
    wide = decode(EVERY_BYTE, EVERY_SCALE, "float32")
    assert np.array_equal(wide, found.astype(np.float32))  # exact, and infinite in both from 2^128 on


def test_a_scale_of_255_is_not_a_number():
    assert np.isnan(decode(EVERY_BYTE[:1], np.full((1, 16), 255, np.uint8), "bfloat16").astype(np.float32)).all()


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((0, 0, 0), (3, 7, 160)), ((1, 2, 32), (1, 3, 64)), ((2, 6, 31), (1, 1, 2)), ((0, 3, 5), (3, 2, 20)),
     ((0, 0, 0), (0, 7, 160)), ((0, 0, 64), (3, 7, 0))],
)  # fmt: skip
def test_a_box_reads_the_blocks_that_it_touches(offsets, sizes):
    codes, scales = RNG.integers(0, 256, (3, 7, 5, 16), np.uint8), RNG.integers(100, 140, (3, 7, 5), np.uint8)
    source, box = Arrays(codes=codes, scales=scales), Box(offsets, sizes)
    found = Mxfp4Blocks(Source("codes"), Source("scales"), "bfloat16").read(source, box)
    expected = dequantize(torch.from_numpy(codes), torch.from_numpy(scales))
    assert torch.equal(as_torch(found), expected[box.slices_within(Box.whole((3, 7, 160)))])
    first, last = offsets[2] // 32, -(-(offsets[2] + sizes[2]) // 32)
    assert sum(box.num_elements for _, box in source.read_boxes) == sizes[0] * sizes[1] * (last - first) * 17


def samples(dtype=torch.bfloat16):
    """Values of all sizes, ties between codes, blocks of zeros and of subnormal numbers."""
    torch.manual_seed(0)
    sizes = torch.tensor([1.0, 1e-3, 1e30, 1e-30, 6e-39])
    values = torch.cat([torch.randn(40, 96) * size for size in sizes])
    values[0] = torch.arange(96) % 32 * 0.25 - 4  # every tie of a scale of 1
    values[1] = 0
    values[2, 5], values[3, :32] = -0.0, torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 4)
    values[4, :32] = torch.tensor([6.0, -5.0, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25] * 4)
    return values.to(dtype)


def test_scales_and_codes_of_the_releases_rule():
    values = samples()
    amax = block_amax(as_numpy(values))
    scales = scales_rounded_up(amax)
    codes = encode(as_numpy(values), scales)
    blocks, expected = quantize(values)
    assert np.array_equal(scales, expected.numpy()) and scales.min() == 0 and scales.max() > 200
    assert np.array_equal(codes, blocks.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_and_codes_of_torchao(dtype):
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    values = samples(dtype)
    theirs = to_mx(values, torch.float4_e2m1fn_x2, 32)
    ours = as_numpy(values) if dtype is torch.bfloat16 else values.numpy()
    scales = scales_rounded_down(block_amax(ours))
    codes = encode(ours, scales)
    large = block_amax(ours) >= 2.0**-124  # below, torchao divides by 2^-126 and states 2^-127
    assert np.array_equal(scales, theirs[0].view(torch.uint8).numpy())
    packed = theirs[1].view(torch.uint8).numpy().reshape(codes.shape)
    assert np.array_equal(codes[large], packed[large]) and large.mean() > 0.75
    assert not np.array_equal(scales, scales_rounded_up(block_amax(ours)))


@pytest.mark.parametrize("rule", [scales_rounded_up, scales_rounded_down])
def test_dequantized_values_are_quantized_to_equal_values(rule):
    codes, scales = RNG.integers(0, 256, (400, 2, 16), np.uint8), RNG.integers(1, 250, (400, 2), np.uint8)
    codes[:100] &= 0x99  # largest codes of 1 (0.5), and nothing else
    codes[100:200] &= 0xBB  # of 3 (1.5)
    codes[200], scales[202:210] = 0x88, 0
    values = decode(codes, scales, "bfloat16")
    once = rule(block_amax(values))
    assert np.array_equal(bits(decode(encode(values, once), once, "bfloat16")), bits(values))
    largest = np.maximum((codes & 7).max(-1), (codes >> 4 & 7).max(-1))
    assert np.array_equal(once == scales, (largest >= 6) | (scales == 0))  # the codes of 4 and 6
    assert (once[:200] < scales[:200]).all() and np.array_equal(once[210:], scales[210:])
    again = rule(block_amax(decode(encode(values, once), once, "bfloat16")))
    assert np.array_equal(again, once)
