"""What we export is what torchtune's own checkpointers open, and its models give transformers' logits."""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.llama3_2 import llama3_2
from torchtune.training import FullModelHFCheckpointer, FullModelMetaCheckpointer

from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from tests.doors import convert
from tests.models.dense import SCALING
from tests.models.llama import write as write_llama

HEADS, KV_HEADS, VOCAB, LAYERS = 4, 2, 302, 2
# Near positions and far ones: only the far ones see RoPE's scaling (9e-3 against 2.4 in the logits)
POSITIONS = torch.stack([torch.arange(48), torch.linspace(0, 16383, 48).long()])
TOKENS = torch.randint(0, VOCAB, POSITIONS.shape, generator=torch.Generator().manual_seed(2))


@dataclass(frozen=True)
class Case:
    """A model of transformers, its logits, how far its own float32 is from float64, and our exports of it."""

    tied: bool
    factor: int
    expected: torch.Tensor
    noise: float
    exports: Path  # hf/ in several files, meta/ in one


@pytest.fixture(scope="module", params=[False, True], ids=["llama 3.1", "llama 3.2, tied"])
def case(request, tmp_path_factory):
    root, tied = tmp_path_factory.mktemp("torchtune"), request.param
    factor = 32 if tied else 8
    model = write_llama(
        root / "theirs",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=SCALING | {"factor": float(factor)},
        tie_word_embeddings=tied,
    )
    convert(root / "theirs", root / "dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=2, tp=2)))
    convert(root / "dcp", root / "hf", to="hf", options=OutputOptions(shard_bytes=200_000))
    convert(root / "dcp", root / "meta", to="meta")
    expected = logits_of(model)
    noise = (logits_of(deepcopy(model).double()) - expected).abs().max().item()
    return Case(tied, factor, expected, noise, root)


@torch.no_grad()
def logits_of(model):
    mask = torch.ones_like(TOKENS)  # each row is one sequence, though its positions leave gaps
    return model(TOKENS, position_ids=POSITIONS, attention_mask=mask).logits


def load_with(checkpointer, case, folder, pattern, tmp_path):
    """The state dict that a recipe of torchtune would get, in torchtune's names."""
    loader = checkpointer(
        checkpoint_dir=str(case.exports / folder),
        checkpoint_files=sorted(p.name for p in (case.exports / folder).glob(pattern)),
        model_type="LLAMA3_2" if case.tied else "LLAMA3",
        output_dir=str(tmp_path),
    )
    return loader.load_checkpoint()["model"]


def largest_difference(state, case):
    """Between torchtune's logits with these weights and transformers' logits."""
    build = llama3_2 if case.tied else llama3_1
    model = build(
        vocab_size=VOCAB,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        embed_dim=64,
        max_seq_len=16384,
        intermediate_dim=176,
        rope_base=500000,
        norm_eps=1e-6,
        scale_factor=case.factor,
    ).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return (model(TOKENS, input_pos=POSITIONS) - case.expected).abs().max().item()


def misplace(weight, num_heads):
    """A head's interleaved rows in halves: the permutation that conversions forget."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


FORMATS = pytest.mark.parametrize(
    ("checkpointer", "folder", "pattern"),
    [
        pytest.param(FullModelHFCheckpointer, "hf", "*.safetensors", id="hf"),
        pytest.param(FullModelMetaCheckpointer, "meta", "*.pth", id="meta"),
    ],
)


@FORMATS
def test_torchtune_gives_the_same_logits(case, checkpointer, folder, pattern, tmp_path):
    state = load_with(checkpointer, case, folder, pattern, tmp_path)
    assert largest_difference(state, case) <= 3 * case.noise


def test_a_misplaced_row_would_be_seen(case, tmp_path):
    """That the bound above means something: one layer's k in the wrong order is a hundred times beyond it."""
    state = load_with(FullModelMetaCheckpointer, case, "meta", "*.pth", tmp_path)
    name = "layers.1.attn.k_proj.weight"
    wrong = state | {name: misplace(state[name], KV_HEADS)}
    assert largest_difference(wrong, case) > 100 * 3 * case.noise


def test_both_formats_are_the_same_to_torchtune(case, tmp_path):
    from_hf = load_with(FullModelHFCheckpointer, case, "hf", "*.safetensors", tmp_path)
    from_meta = load_with(FullModelMetaCheckpointer, case, "meta", "*.pth", tmp_path)
    assert from_hf.keys() == from_meta.keys()
    assert all(torch.equal(from_hf[name], from_meta[name]) for name in from_hf)
