"""Products of mxfp4 weights: against the OCP specification's table of values, multiplied in float64."""

from copy import copy

import pytest
import torch
import torch.nn.functional as F

from converters.common.box import Box
from converters.common.errors import CheckpointError
from converters.quantized.stored_blocks import BlocksSource
from converters.source.weights import open_native
from tests.fp8_folders import read_folder
from tests.models.gpt_oss import CONFIG, save, write_mxfp4
from tests.models.gpt_oss import write as write_gpt_oss
from tests.tiny_infer import CPU
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.model import linear, mxfp4_blocks
from titan_tools.infer.model.experts import RowsOfOneToken, SortedRows, StoredExperts
from titan_tools.infer.model.load import load_model
from titan_tools.infer.model.mxfp4_blocks import (
    Mxfp4Slice,
    _gathered_products,
    chosen_values_products,
    mxfp4_reads,
    mxfp4_slice,
    products_are_right,
)
from titan_tools.infer.model.quantize import STORED
from titan_tools.infer.model.stored_weight import StoredWeight
from trainer.parallel.compile import why_inductor_cannot

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
pytestmark = pytest.mark.usefixtures("one_thread")


def random_weight(*sizes, seed=0):
    """Codes and scales of [..., N, k] blocks, and the values in float64."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, sizes, dtype=torch.uint8, generator=generator)
    low, high = (VALUES[half.long()] for half in (codes % 16, codes // 16))
    values = torch.stack((low, high), -1).flatten(-2) * torch.exp2(scales.double() - 127).unsqueeze(-1)
    return codes, scales, values.flatten(-2)


def slice_of(codes, scales, start=0, columns=None):
    made = Mxfp4Slice(start, 32 * scales.shape[-1] if columns is None else columns)
    made.codes, made.scales = codes, scales
    return made


@pytest.mark.parametrize(("start", "columns"), [(0, 96), (6, 90), (31, 33), (0, 65)])
def test_a_weight_multiplies_its_values(start, columns, monkeypatch):
    """Of whole blocks and of parts, a few rows at a time."""
    monkeypatch.setattr(mxfp4_blocks, "BLOCK_ELEMENTS", 500)
    codes, scales, values = random_weight(37, 3)
    exact = values[:, start : start + columns]
    weight = StoredWeight([slice_of(codes, scales, start, columns), slice_of(codes, scales, start, columns)])
    x = torch.randn(5, columns, dtype=torch.float64)
    found = F.linear(x.float(), weight, torch.ones(74))
    assert weight.shape == (74, columns) and weight.num_bytes == 2 * 37 * 3 * 17
    expected = x @ torch.cat((exact, exact)).T + 1
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    identity = torch.eye(columns, dtype=torch.bfloat16)
    assert torch.equal(F.linear(identity, weight)[:, :37].T.double(), exact)  # exact in bfloat16


def test_all_codes_in_registers_are_those_of_the_table():
    assert torch.equal(mxfp4_blocks.code_values(torch.arange(16)).double(), VALUES)
    scales = torch.arange(1, 255, dtype=torch.uint8)
    assert torch.equal(mxfp4_blocks.scale_values(scales).double(), torch.exp2(scales.double() - 127))


@pytest.mark.parametrize(("start", "columns"), [(0, 96), (10, 70)])
def test_experts_multiply_their_rows(start, columns):
    codes, scales, values = random_weight(4, 20, 3)
    experts = StoredExperts([slice_of(codes, scales, start, columns)])
    ids_TK = torch.tensor([[3, 0], [0, 1], [3, 1]])
    x_TK = torch.randn(3, columns)
    exact = torch.stack([values[e, :, start : start + columns] @ x.double() for e, x in
                         ((e, x) for ids, x in zip(ids_TK.tolist(), x_TK, strict=True) for e in ids)])  # fmt: skip
    rows = SortedRows(ids_TK, 4)
    by_expert = rows.of_tokens(experts.multiply(rows.of_experts(x_TK), rows))
    chosen = experts.multiply_chosen(x_TK[:, None].expand(3, 2, -1).flatten(0, 1), ids_TK.flatten())
    one = experts.multiply(x_TK[:1].expand(2, -1), RowsOfOneToken(ids_TK[:1]))
    for found, expected in ((by_expert, exact), (chosen, exact), (one, exact[:2])):
        assert (found - expected).abs().max() < 1e-5 * exact.abs().max()
    assert experts.num_bytes == 20 * 3 * 17


def test_a_kernel_is_tried_before_it_is_used():
    compiled = torch.compile(chosen_values_products, backend="eager")
    for products in (chosen_values_products, _gathered_products, compiled):
        assert products_are_right(products, CPU)
    torch._dynamo.reset()

    def halves_swapped(x, codes, scales, ids):
        return chosen_values_products(x, codes >> 4 | codes << 4, scales, ids)

    def next_expert(x, codes, scales, ids):
        return chosen_values_products(x, codes, scales.roll(1, 0), ids)

    assert not products_are_right(halves_swapped, CPU) and not products_are_right(next_expert, CPU)


def test_a_gpu_gets_the_kernel_and_the_rows(monkeypatch):
    """How it is called, on a device that says it is a GPU."""
    calls = []

    def products(x_RK, codes, scales, ids_R):
        calls.append((tuple(x_RK.shape), ids_R.tolist()))
        return chosen_values_products(x_RK, codes, scales, ids_R)

    monkeypatch.setattr(mxfp4_blocks, "_compiled_products", lambda: products)

    class OnGpu(torch.Tensor):
        is_cuda = True

    codes, scales, values = random_weight(4, 20, 3)
    x_RK = torch.randn(2, 90).as_subclass(OnGpu)
    found = slice_of(codes, scales, 6, 90).chosen_products(x_RK, torch.tensor([2, 0]))
    exact = torch.einsum("rk,rnk->rn", x_RK.as_subclass(torch.Tensor).double(), values[[2, 0], :, 6:96])
    assert calls == [((2, 96), [2, 0])]
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_slice_reads_the_blocks_that_it_touches():
    box = Box((1, 4, 40), (2, 6, 30))
    made = mxfp4_slice(box)
    (codes, _), (scales, _) = mxfp4_reads(made, "w", box)
    assert (made.start, made.columns) == (8, 30)
    assert codes.boxes == (("codes of w", Box((1, 4, 1, 0), (2, 6, 2, 16))),)
    assert scales.boxes == (("scales of w", Box((1, 4, 1), (2, 6, 2))),)


def test_blocks_of_rows_are_small():
    assert mxfp4_blocks.BLOCK_ELEMENTS == linear.BLOCK_ELEMENTS  # the values stay in a core's cache


class Published:
    """A folder in mxfp4, transformers' model of its values, and what that says of a text longer than the window."""

    TEXT = [(37 * n + 11) % 97 for n in range(30)]

    def __init__(self, folder):
        self.model = write_gpt_oss(folder / "hf", dtype="float32")
        values = write_mxfp4(folder / "mxfp4", folder / "hf")
        self.model.load_state_dict({name: tensor.float() for name, tensor in values.items()})
        self.folder = folder / "mxfp4"
        with torch.inference_mode():
            self.logits = self.model(torch.tensor([self.TEXT])).logits[0, 19:]

    def load(self, *, tp=1, rank=0, quantize=STORED, dtype=torch.float32, **options):
        with open_native(self.folder) as weights:
            source = BlocksSource(weights.source) if quantize == STORED else weights.source
            return load_model(
                source, weights.info, dtype=dtype, device=CPU, tp=tp, rank=rank, quantize=quantize, **options
            )

    def error(self, model, **engine):
        """Of the logits after 20 tokens and after each that follows, compared with the largest."""
        engine = Engine(model, rows=1, room=64, **engine)
        said = [engine.prefill(0, self.TEXT[:20]), *(engine.decode([token])[0] for token in self.TEXT[20:])]
        return float((torch.stack(said) - self.logits).abs().max() / self.logits.abs().max())


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return Published(tmp_path_factory.mktemp("oss"))


def test_a_published_folder_says_what_transformers_says(published):
    """With the experts as they are stored, as values, and rounded to 8 bits."""
    kept, made, rounded = (published.load(quantize=how) for how in (STORED, None, "int8"))
    assert published.error(kept) < 1e-5 and published.error(made) < 1e-5
    assert 1e-5 < published.error(rounded) < 0.3
    experts = [layer.experts for layer in kept.experts]
    assert all(isinstance(each.gate_up, StoredExperts) and isinstance(each.down, StoredExperts) for each in experts)
    assert experts[0].num_bytes == (2 * 96 * 64 + 64 * 96) * 17 // 32
    assert isinstance(kept.body.layers["0"].attention.wq, torch.nn.Linear)
    assert kept.body.layers["0"].attention.wq.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "options", [{"static": True}, pytest.param({"compile": True, "backend": "eager"}, marks=pytest.mark.slow)]
)
def test_steps_of_fixed_shapes_say_the_same(published, options):
    assert published.error(published.load(packed=False), **options) < 1e-5
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(why_inductor_cannot(CPU) is not None, reason="nothing to compile C++ with")
def test_a_step_that_inductor_compiled_says_the_same(published):
    assert published.error(published.load(packed=False), compile=True) < 1e-5
    torch._dynamo.reset()


def test_slices_of_ranks_cut_through_blocks(published):
    """96 features on four ranks: 24 each, of blocks of 32. Together they are the experts' output."""
    x_TD, ids_TK = torch.randn(5, 64), torch.tensor([[0, 11], [3, 4], [11, 0], [5, 5], [2, 7]])
    rows = SortedRows(ids_TK, 12)
    whole, *parts = (published.load(tp=tp, rank=rank) for tp, rank in ((1, 0), *((4, rank) for rank in range(4))))
    exact, *found = (model.experts[1].experts.multiply(rows.of_experts(x_TD), rows) for model in (whole, *parts))
    assert parts[1].experts[1].experts.down.slices[0].start == 24
    assert (sum(found) - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_scale_that_is_no_number_is_refused(published, tmp_path):
    tensors = read_folder(published.folder)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][3, 5, 1] = 255
    odd = copy(published)
    odd.folder = save(tmp_path / "odd", tensors, published.folder, CONFIG)
    with pytest.raises(CheckpointError, match=r"layers\.1\.moe\.experts\.mlp2_weight has a scale of 255"):
        odd.load()
