"""Windows, chunks, sinks and mxfp4 experts of inference on a GPU: kernels against values, and transformers."""

import pytest
import torch

from converters.quantized.stored_blocks import BlocksSource
from converters.source.weights import open_native
from tests.models.gpt_oss import write as write_gpt_oss
from tests.models.gpt_oss import write_mxfp4
from tests.models.in_memory import NUMBERS, load_native, make
from titan_tools.infer.decoding.attention import can_flash
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.static_decode import _is_right, can_split
from titan_tools.infer.model import mxfp4_blocks
from titan_tools.infer.model.load import load_model
from titan_tools.infer.model.quantize import STORED
from trainer.parallel.compile import why_inductor_cannot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda", 0)
TEXT = [(37 * n + 11) % 97 for n in range(60)]


def test_sinks_use_flash_attention_from_ampere_on():
    is_known = torch.cuda.get_device_capability(GPU) >= (8, 0)
    for head_dim in (64, 128):
        assert can_flash(GPU, torch.bfloat16, head_dim) == is_known
        cases = {(heads, length): {"num_heads": heads, "length": length} for heads in (2, 8) for length in (128, 512)}
        right = {case: _is_right(GPU, torch.bfloat16, head_dim, sinks=True, **each) for case, each in cases.items()}
        assert can_split(GPU, torch.bfloat16, head_dim, sinks=True) == is_known, right
    assert not can_flash(GPU, torch.float32, 64)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_and_recorded_steps_say_what_transformers_says(name, dtype):
    """In bfloat16 every expert is chosen: else a rounded router decides otherwise at a near tie, as transformers' does.

    The error then is at most 1.5 times that of transformers' model in bfloat16: as many roundings, of the same size.
    On a CPU it is 0.9 to 1.1 times that (transformers': 0.20, 0.046 and 0.042 of the logits).
    """
    numbers = {} if dtype == "float32" else {"num_experts_per_tok": NUMBERS[name]["num_local_experts"]}
    theirs = make(name, **numbers)
    with torch.inference_mode():
        expected = theirs(torch.tensor([TEXT])).logits[0, 29:]
    engine = Engine(load_native(theirs, dtype=dtype, device=GPU), rows=2, room=64)
    engine.prefill(1, TEXT[:9])
    said = [engine.prefill(0, TEXT[:17]), engine.prefill(0, TEXT[:30], keep=17)]
    said += [engine.decode([token, 5])[0] for token in TEXT[30:]]
    found = torch.stack(said[1:]).float().cpu()
    allowed = 1e-3 * expected.norm()
    if dtype == "bfloat16":
        with torch.inference_mode():
            allowed = 1.5 * (theirs.bfloat16()(torch.tensor([TEXT])).logits[0, 29:].float() - expected).norm()
    assert (found - expected).norm() < allowed


def test_codes_of_experts_are_multiplied_as_they_are(tmp_path):
    write_gpt_oss(tmp_path / "source", dtype="bfloat16")
    write_mxfp4(tmp_path / "mxfp4", tmp_path / "source")
    said = []
    for quantize in (STORED, None):
        with open_native(tmp_path / "mxfp4") as weights:
            source = BlocksSource(weights.source) if quantize else weights.source
            model = load_model(source, weights.info, dtype=torch.bfloat16, device=GPU, quantize=quantize)
        engine = Engine(model, rows=2, room=64)
        logits = [engine.prefill(0, TEXT[:20]), engine.prefill(1, TEXT[3:9])]
        logits += [row for token in TEXT[20:26] for row in engine.decode([token, 7])]
        said.append(torch.stack(logits).float().cpu())
    assert mxfp4_blocks.has_products(GPU) == (why_inductor_cannot(GPU) is None)
    assert (said[0] - said[1]).norm() < 0.05 * said[1].norm()


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_a_kernel_of_published_sizes(rows):
    """GPT-OSS's gate_up_proj."""
    generator = torch.Generator(GPU).manual_seed(0)
    codes = torch.randint(0, 256, (8, 5760, 90, 16), dtype=torch.uint8, generator=generator, device=GPU)
    scales = torch.randint(116, 121, (8, 5760, 90), dtype=torch.uint8, generator=generator, device=GPU)
    x_RK = torch.randn(rows, 2880, generator=generator, device=GPU).bfloat16()
    ids_R = torch.randint(0, 8, (rows,), generator=generator, device=GPU)
    found = mxfp4_blocks._compiled_products()(x_RK, codes, scales, ids_R).float()
    exact = mxfp4_blocks._gathered_products(x_RK.float(), codes, scales, ids_R)
    assert (found - exact).norm() < 0.01 * exact.norm()
