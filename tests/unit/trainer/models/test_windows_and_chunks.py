"""GPT-OSS and Llama 4 against transformers, at lengths beyond window, chunk, temperature and YaRN's original length."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from converters.common.errors import UnsupportedError
from converters.families import gpt_oss, llama4
from converters.families.blocks import Temperature, dense_block, rope_of
from converters.families.llama3 import LLAMA3
from converters.families.registry import get_family
from converters.families.rope import RopeScaling
from tests.models.names import native_tensors
from tests.models.of_args import model_of
from trainer.config.sections import Compile
from trainer.models.decoder import Transformer
from trainer.models.registry import check_kinds, get_trainer_family
from trainer.models.rope import RotaryAngles, TemperatureFactors
from trainer.parallel.compile import apply_compile
from trainer.parallel.document_attention import PerDocumentAttention, positions_in_documents
from trainer.parallel.masked_attention import apply_masks, masked_layers

# eps is large enough to matter
SMALL = {"vocab_size": 256, "norm_eps": 1e-3}
MODELS = {
    "debug_window": ("gpt_oss", replace(gpt_oss.FLAVORS["debug_window"], **SMALL)),
    "experts as wide as the model": ("gpt_oss", replace(gpt_oss.FLAVORS["debug_window"], **SMALL, ffn_hidden=128)),
    "debug_scout": ("llama4", replace(llama4.FLAVORS["debug_scout"], **SMALL)),
    "debug_maverick": ("llama4", replace(llama4.FLAVORS["debug_maverick"], **SMALL)),
}
LENGTH = 90  # window 8, chunk 24, temperature's length 16, YaRN's original length 64


@cache
def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """Ours and theirs, with the same weights."""
    family, args = MODELS[name]
    theirs, ours = model_of(family, args), get_trainer_family(family).build_model(args)
    for fqn, buffer in ours.named_buffers():
        assert fqn.endswith("expert_bias")
        buffer.zero_()  # transformers' has none
    missing = ours.load_state_dict(native_tensors(theirs.state_dict()), strict=False)
    assert not missing.unexpected_keys and all(key.endswith("expert_bias") for key in missing.missing_keys)
    return ours, theirs


@cache
def masked(name: str) -> nn.Module:
    """Ours as it is trained on a CPU, with attention within documents or without."""
    family, args = MODELS[name]
    model = get_trainer_family(family).build_model(args)
    model.load_state_dict(pair(name)[0].state_dict())
    layers = masked_layers(model, PerDocumentAttention, has_documents=True)
    apply_masks(model, layers, torch.device("cpu"))
    return model


def tokens_of(name: str, length: int) -> Tensor:
    return torch.randint(MODELS[name][1].vocab_size, (2, length), generator=torch.Generator().manual_seed(length))


def bound_of(name: str, tokens: Tensor) -> float:
    """1e-5 of the largest logit, or a few times what transformers' own arithmetic is off by."""
    _, theirs = pair(name)
    exact = copy.deepcopy(theirs).double()(tokens).logits
    own_error = (theirs(tokens).logits - exact).abs().max().item()
    assert own_error <= 1e-4 * exact.abs().max(), "a route is nearly a tie"
    return max(1e-5 * exact.abs().max().item(), 4 * own_error)


@pytest.mark.parametrize("length", [1, 9, 25, LENGTH])
@pytest.mark.parametrize("name", MODELS)
def test_logits_beyond_windows_and_chunks(name, length):
    ours, theirs = pair(name)
    tokens = tokens_of(name, length)
    with torch.no_grad():
        wanted, bound = theirs(tokens).logits, bound_of(name, tokens)
        for model in (ours, masked(name)):
            assert (model(tokens) - wanted).abs().max() <= bound


@pytest.mark.parametrize("name", MODELS)
def test_gradients_beyond_windows_and_chunks(name):
    (ours, theirs), tokens = pair(name), tokens_of(name, LENGTH)
    gradients = []
    for model in (copy.deepcopy(theirs).double(), theirs, ours, masked(name)):
        model.zero_grad()
        output = model(tokens)
        (output if isinstance(output, Tensor) else output.logits).logsumexp(-1).square().mean().backward()
        gradients.append({fqn: p.grad for fqn, p in model.named_parameters()})
    exact, wanted = map(native_tensors, gradients[:2])
    for found in gradients[2:]:
        assert found.keys() == wanted.keys()
        for fqn, gradient in found.items():
            error, own_error = ((each - exact[fqn]).norm() / exact[fqn].norm() for each in (gradient, wanted[fqn]))
            assert error <= max(1e-5, 4 * own_error), fqn


@pytest.mark.parametrize("name", ["debug_window", "debug_scout"])
def test_positions_of_windows_chunks_and_temperatures_are_those_of_the_document(name):
    """Documents of a batch are those of transformers, each by itself; also in a sequence that begins elsewhere."""
    _, theirs = pair(name)
    tokens, lengths = tokens_of(name, LENGTH), (1, 30, 7, 52)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(2, -1)
    with torch.no_grad():
        found = masked(name)(tokens, positions_in_documents(documents), documents=documents)
        wanted = torch.cat([theirs(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
        assert (found - wanted).abs().max() <= bound_of(name, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["debug_window", "debug_scout"])
def test_layers_of_one_attention_share_compiled_code(name):
    """One graph for each kind, for a batch of documents or of none; results are those of the model as it is."""
    model = copy.deepcopy(masked(name)).requires_grad_(False)
    apply_masks(model, masked_layers(model, PerDocumentAttention, has_documents=True), torch.device("cpu"))
    tokens, wanted = tokens_of(name, LENGTH), masked(name)
    documents = (torch.arange(LENGTH) // 37).expand(2, -1)
    torch._dynamo.reset()
    counters.clear()
    try:
        apply_compile(model, Compile(enable=True, backend="aot_eager"))
        with torch.no_grad():
            for given in ({}, {"documents": documents}):
                torch.testing.assert_close(model(tokens, **given), wanted(tokens, **given), rtol=1e-4, atol=1e-4)
        kinds = {layer.attention.kind for layer in model.layers.values()}
        assert counters["stats"]["unique_graphs"] == len(kinds) * 2
    finally:
        torch._dynamo.reset()


def test_llama_4_by_transformers_own_sdpa():
    ours, _ = pair("debug_scout")
    theirs = model_of("llama4", MODELS["debug_scout"][1], attention="sdpa")
    tokens = tokens_of("debug_scout", LENGTH)
    with torch.no_grad():
        found, wanted = ours(tokens), theirs(tokens).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_q_and_k_in_bf16_are_those_of_transformers(monkeypatch):
    """Rotated, rounded, then normed in fp32: a norm without weights is that of the rotated head but for rounding.

    Equal bits, but where the product in fp32 rounds to the other side of a tie of bf16: in 60 draws at most 3 values
    of 172,800, by at most two units (2^-7 of the value each).
    """
    from transformers.models.llama4 import modeling_llama4

    ours, theirs = (copy.deepcopy(model).bfloat16() for model in pair("debug_scout"))
    x, positions, given, wanted = torch.randn(1, LENGTH, 128).bfloat16(), torch.arange(LENGTH), [], []
    rotations = pair("debug_scout")[1].model.rotary_emb(x, positions[None])  # frequencies as loaded: fp32

    def attend(module, query, key, value, *rest, **others):
        wanted.extend((query.transpose(1, 2), key.transpose(1, 2)))
        return value.transpose(1, 2).repeat_interleave(2, dim=2), None

    monkeypatch.setattr(modeling_llama4, "eager_attention_forward", attend)
    for number, layer in enumerate(theirs.model.layers):
        layer.self_attn(x, rotations, None)
        attention = ours.layers[str(number)].attention
        attention.inner_attention.register_forward_pre_hook(lambda _, inputs: given.extend(inputs[:2]))
        attention(x, ours.rope(positions))
    assert len(given) == len(wanted) == 2 * len(theirs.model.layers)
    mine, other = (torch.cat([each.flatten() for each in both]) for both in (given, wanted))
    assert (mine != other).sum() <= 1e-4 * mine.numel()
    torch.testing.assert_close(mine, other, rtol=2**-6, atol=0)


def test_a_window_that_the_attention_does_not_compute_is_refused():
    """Of a user's own family, whose `block` says more than its model."""

    def windowed(args, layer):
        plain = dense_block(args, layer)
        return replace(plain, attention=replace(plain.attention, window=4)) if layer == 1 else plain

    family, args = replace(LLAMA3, block=windowed), LLAMA3.flavors["debug_gqa"]
    with pytest.raises(UnsupportedError, match="`block` describes") as error:
        check_kinds(Transformer(args), family, args)
    assert "layers.1.attention: kind = GroupedQuery(" in error.value.message and "window=4" in error.value.message
    assert "layers.0" not in error.value.message
    for name, own in (("gpt_oss", "debug_window"), ("llama4", "debug_scout"), ("deepseek_v3", "debug_v3")):
        args = get_family(name).flavors[own]
        check_kinds(get_trainer_family(name).build_model(args), get_family(name), args)


def test_frequencies_of_one_factor_for_low_and_high_are_those_of_transformers():
    """Llama 4's: no ramp between the frequencies that are kept and those that are divided."""
    args = MODELS["debug_scout"][1]
    for head_dim, original in ((128, 8192), (32, 8192), (32, 100), (64, 1)):
        scaling = RopeScaling(16.0, 1.0, 1.0, original)
        args = replace(args, head_dim=head_dim, rope_scaling=scaling, vocab_size=8, num_layers=1, sparse_layers=())
        wanted = model_of("llama4", args).model.rotary_emb.inv_freq
        assert RotaryAngles(rope_of(args, pairs=True)).frequencies_P.equal(wanted)
        assert wanted.isfinite().all()


@pytest.mark.parametrize("flavor", ["20b", "debug_window"])
def test_yarn_of_gpt_oss_is_that_of_transformers(flavor):
    args = replace(gpt_oss.FLAVORS[flavor], num_layers=1, vocab_size=8, num_experts=4, ffn_hidden=4)
    theirs, angles = model_of("gpt_oss", args).model.rotary_emb, RotaryAngles(rope_of(args, pairs=False))
    assert angles.frequencies_P.equal(theirs.inv_freq)
    assert angles.scale == theirs.attention_scaling == pytest.approx(1.3466, abs=5e-5)
    positions = torch.arange(0, 20000, 7)
    for ours, wanted in zip(angles(positions), theirs(torch.zeros(1), positions[None]), strict=True):
        assert ours[:, 0].equal(wanted[0])


def test_the_temperature_rises_at_each_multiple_of_its_length():
    """Of the number of tokens so far, this one included."""
    positions = torch.tensor([0, 8190, 8191, 16382, 16383, 10485759])
    wanted = [1 + 0.1 * torch.tensor(n + 1.0).log().item() for n in (0, 0, 1, 1, 2, 1280)]
    assert TemperatureFactors(Temperature(0.1, 8192, first=1))(positions).flatten().tolist() == pytest.approx(
        wanted, rel=1e-6
    )


def test_gpt_oss_rotates_with_bf16_weights_in_fp32():
    """Position 16,000 would be 16,000 ± 32 in bf16."""
    args = MODELS["debug_window"][1]
    model = get_trainer_family("gpt_oss").build_model(args).bfloat16()
    assert [each.dtype for each in model.rope(torch.tensor([16001]))] == [torch.float32]
    scout = get_trainer_family("llama4").build_model(MODELS["debug_scout"][1]).bfloat16()
    assert [each.dtype for each in scout.rope(torch.tensor([16001]))] == [torch.float32] * 2
