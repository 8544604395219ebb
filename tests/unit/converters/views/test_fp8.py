"""converters/views/fp8.py and the expression Fp8Blocks: every bit as torch computes it from the published formulas."""

import ml_dtypes
import numpy as np
import pytest
import torch

from converters.common.box import Box
from converters.views import fp8
from converters.views.expressions import Fp8Blocks, HeadRows, Source, Stack
from tests.fp8_folders import dequantize, quantize
from tests.unit.converters.samples import Arrays

BLOCK = (128, 128)
LARGEST_SCALE = float(np.finfo(np.float32).max)
TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def bits(values) -> np.ndarray:
    """Of an array or tensor, whatever its type."""
    if isinstance(values, torch.Tensor):
        values = values.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(values).view(np.uint8)


def stored(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array of ml_dtypes."""
    kind = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.bfloat16: ml_dtypes.bfloat16}.get(tensor.dtype)
    if kind is None:
        return tensor.numpy()
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.uint16).numpy().view(kind)


def node(dtype="bfloat16", block=BLOCK):
    return Fp8Blocks(Source("codes"), Source("scales"), block, dtype)


def all_codes(rows: int, columns: int) -> torch.Tensor:
    """Every finite code, in another order in each row."""
    finite = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    return finite[torch.arange(rows * columns).reshape(rows, columns) * 7 % 254].view(torch.float8_e4m3fn)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 576])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_finite_code_times_every_kind_of_scale(rows, dtype):
    codes = all_codes(rows, 256 + 254)
    kinds = torch.tensor([0.0, 1e-42, 1.0, LARGEST_SCALE, 0.0123])
    scales = kinds[torch.arange(-(-rows // 128) * 4) % 5].reshape(-1, 4)
    source = Arrays(codes=stored(codes), scales=scales.numpy())
    found = node(dtype).read(source, Box.whole(codes.shape))
    assert np.array_equal(bits(found), bits(dequantize(codes, scales, dtype=TORCH[dtype])))


@pytest.mark.parametrize("block", [BLOCK, (32, 64), (1, 128)])
def test_any_box_reads_its_own_codes_and_the_scales_of_its_blocks(block):
    generator = np.random.default_rng(0)
    codes = all_codes(300, 200)
    scales = torch.rand(-(-300 // block[0]), -(-200 // block[1]))
    whole = bits(dequantize(codes, scales, block=block)).reshape(300, 200, 2)
    for _ in range(80):
        starts = [int(generator.integers(0, size)) for size in (300, 200)]
        sizes = [int(generator.integers(0, size - start + 1)) for size, start in zip((300, 200), starts, strict=True)]
        box = Box(tuple(starts), tuple(sizes))
        source = Arrays(codes=stored(codes), scales=scales.numpy())
        found = node(block=block).read(source, box)
        assert found.shape == box.sizes and found.dtype == ml_dtypes.bfloat16
        assert np.array_equal(bits(found).reshape(*box.sizes, 2), whole[box.slices_within(Box.whole((300, 200)))])
        assert source.read_boxes[0] == ("codes", box)
        for name, blocks in source.read_boxes[1:]:
            assert name == "scales"
            for d in (0, 1):
                last = blocks.offsets[d] + blocks.sizes[d] - 1
                assert blocks.offsets[d] == starts[d] // block[d] and last == (starts[d] + sizes[d] - 1) // block[d]


def test_codes_that_are_nan_and_infinite_scales_give_values_that_are_counted():
    from converters.views.casts import count_non_finite

    codes = torch.zeros(2, 256, dtype=torch.uint8)
    codes[0, 0], codes[1, 255] = 0x7F, 0xFF
    scales = torch.tensor([[1.0, 2.0]])
    source = Arrays(codes=stored(codes.view(torch.float8_e4m3fn)), scales=scales.numpy())
    assert count_non_finite(node().read(source, Box.whole((2, 256))), "bfloat16") == 2
    source.arrays["scales"] = np.array([[np.inf, 2.0]], np.float32)  # 0 · ∞ is NaN
    assert count_non_finite(node().read(source, Box.whole((2, 256))), "bfloat16") == 257


def test_scales_in_bfloat16_are_widened_first():
    codes, scales = all_codes(130, 130), torch.rand(2, 2).bfloat16()
    source = Arrays(codes=stored(codes), scales=stored(scales))
    found = node("float32").read(source, Box.whole((130, 130)))
    assert np.array_equal(bits(found), bits(dequantize(codes, scales, dtype=torch.float32)))


def test_it_is_a_leaf_below_heads_and_stacks():
    codes, scales = all_codes(256, 40), torch.rand(2, 1)
    source = Arrays(codes=stored(codes), scales=scales.numpy())
    whole = dequantize(codes, scales)
    heads = HeadRows(node(), 4, to_halves=False)
    box = Box((126, 3), (130, 30))
    expected = whole.reshape(64, 2, 2, 40).transpose(1, 2).reshape(256, 40)[126:, 3:33]
    assert np.array_equal(bits(heads.read(source, box)), bits(expected))
    stack = Stack((node(), node()))
    assert stack.rows_together == 128 and stack.sources == ("codes", "scales") * 2
    found = stack.read(source, Box((1, 100, 0), (1, 60, 40)))
    assert np.array_equal(bits(found), bits(whole[None, 100:160]))
    assert node().source_rows(range(3, 7)) == range(3, 7)
    assert node().renamed(str.upper).sources == ("CODES", "SCALES")


WEIGHTS = {
    "normal": lambda shape: torch.randn(shape) * 0.02,
    "wide": lambda shape: torch.randn(shape) * torch.exp(4 * torch.randn(shape)),
    "tiny": lambda shape: torch.randn(shape) * 1e-6,  # below the smallest scale
    "zero": lambda shape: -torch.zeros(shape),
    "ties": lambda shape: torch.randint(-40, 40, shape).float() / 16,
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_codes_and_scales_are_deepgemms(kind, dtype, ue8m0):
    torch.manual_seed(0)
    for shape in ((1, 1), (127, 129), (576, 300)):
        weight = WEIGHTS[kind](shape).to(TORCH[dtype])
        codes, scales = quantize(weight, ue8m0=ue8m0)
        values = stored(weight)
        amax = fp8.block_amax(values, BLOCK)
        ours = fp8.scales_of(amax, power_of_two=ue8m0)
        assert np.array_equal(bits(ours), bits(scales))
        found = fp8.encode(values, amax, ours, BLOCK, exact=np.full(ours.shape, ue8m0))
        assert np.array_equal(found, bits(codes).reshape(shape))


def test_rounding_is_torchs_for_every_kind_of_float32():
    values = np.arange(0, np.float32(449).view(np.uint32), 1009, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, -values])
    halves = np.sort(np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    ties = (halves[1:] + halves[:-1]) / 2
    values = np.concatenate([values, ties, np.nextafter(ties, 0), np.nextafter(ties, 500), -ties]).astype(np.float32)
    expected = torch.from_numpy(values.copy()).clamp(-448, 448).to(torch.float8_e4m3fn)
    out = np.empty(values.shape, np.uint8)
    fp8._round_to_e4m3(values, out=out)
    assert np.array_equal(out, bits(expected))


def test_kept_scales_give_the_codes_back():
    """Through bfloat16, for every finite code but the sign of nothing: zero has one, too."""
    codes = all_codes(129, 300)
    scales = torch.exp(8 * torch.randn(2, 3))
    values = stored(dequantize(codes, scales))
    amax = fp8.block_amax(values, BLOCK)
    kept = scales.numpy()
    assert not fp8.saturated(amax, kept).any()
    found = fp8.encode(values, amax, kept, BLOCK, exact=np.ones(kept.shape, bool))
    assert np.array_equal(found, bits(codes).reshape(129, 300))
    assert fp8.saturated(np.float32([463.9, 464.0, 0]), np.float32([1, 1, 0])).tolist() == [False, True, False]


@pytest.mark.parametrize(("dtype", "smallest"), [("bfloat16", -124), ("float32", -140)])
def test_kept_scales_give_the_codes_back_down_to_a_limit(dtype, smallest):
    """Below it, values of the smallest codes are no numbers of `dtype`, and a few codes change."""
    codes = all_codes(1, 254)
    for exponent in (smallest - 1, smallest, 0, 118):
        scales = torch.full((1, 2), 1.25 * 2.0**exponent)
        values = stored(dequantize(codes, scales, dtype=TORCH[dtype]))
        amax = fp8.block_amax(values, BLOCK)
        found = fp8.encode(values, amax, scales.numpy(), BLOCK, exact=np.ones((1, 2), bool))
        assert np.array_equal(found, bits(codes).reshape(1, 254)) == (exponent >= smallest)


def generations(weight: torch.Tensor, num: int, *, ue8m0: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Codes and scales, each quantized from the bfloat16 values of the one before; all are the formula's."""
    made = []
    for _ in range(num):
        values = stored(weight)
        amax = fp8.block_amax(values, BLOCK)
        scales = fp8.scales_of(amax, power_of_two=ue8m0)
        codes = fp8.encode(values, amax, scales, BLOCK, exact=np.full(scales.shape, ue8m0))
        expected = quantize(weight, ue8m0=ue8m0)
        assert np.array_equal(codes, bits(expected[0]).reshape(codes.shape))
        assert np.array_equal(bits(scales), bits(expected[1]))
        made.append((codes, scales))
        weight = dequantize(*expected)
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_codes_and_scales_are_stable_from_the_second_generation(dtype):
    """The first one's scales move by bfloat16's rounding of the largest value, where it was made from float32."""
    torch.manual_seed(0)
    weight = (torch.randn(1024, 512) * torch.exp(3 * torch.randn(1024, 1))).to(TORCH[dtype])
    one, two, three = generations(weight, 3, ue8m0=False)
    assert np.array_equal(bits(two[1]), bits(three[1])) and np.array_equal(two[0], three[0])
    assert np.array_equal(one[0], two[0])
    moved = np.abs(two[1] / one[1] - 1)
    assert moved.max() <= 2**-8 and (moved.max() == 0) == (dtype == "bfloat16")


def test_power_of_two_scales_halve_once_where_the_largest_code_is_224():
    """All 128 significands of a bfloat16: of those in (224, 232] · 2^n the formula's scale is twice what 224 needs."""
    largest = torch.zeros(128 * 128, 128)
    largest[::128, 0] = (torch.arange(128) / 128 + 1) * 2.0**-7
    one, two, three = generations(largest.bfloat16(), 3, ue8m0=True)
    assert np.array_equal(bits(two[1]), bits(three[1])) and np.array_equal(two[0], three[0])
    moved = (one[1] != two[1])[:, 0]
    codes = one[0][::128, 0].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert moved.sum() == 8 and (codes[moved] == 224).all() and (codes[~moved] > 224).all()
    assert (one[1][moved] == 2 * two[1][moved]).all()
    values = [
        fp8.decode(c.view(ml_dtypes.float8_e4m3fn), s, BLOCK, start=(0, 0), dtype="bfloat16") for c, s in (one, two)
    ]
    assert np.array_equal(bits(values[0]), bits(values[1]))


def test_zeros_of_both_signs_keep_a_scale_of_zero():
    codes = torch.tensor([[0x00, 0x80] * 64], dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.zeros(1, 1)
    values = stored(dequantize(codes, scales))
    amax = fp8.block_amax(values, BLOCK)
    assert not fp8.saturated(amax, scales.numpy()).any()
    found = fp8.encode(values, amax, scales.numpy(), BLOCK, exact=np.ones((1, 1), bool))
    assert np.array_equal(found, bits(codes).reshape(1, 128))
