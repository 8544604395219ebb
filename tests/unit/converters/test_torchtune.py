"""What we export is what torchtune's own checkpointer opens, and its model gives transformers' logits."""

import shutil

import pytest
import torch
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.llama3_2 import llama3_2
from torchtune.training import FullModelHFCheckpointer
from transformers import LlamaForCausalLM

from converters.convert import convert
from converters.layout import MeshShape
from tests.tiny_llama import write_llama

NUMBERS = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
POSITIONS = torch.arange(0, 2000, 40)  # far ones too: RoPE's scaling shows only there


def scaling(factor):
    lengths = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_type": "llama3", "factor": factor, **lengths}


@pytest.mark.parametrize("tied", [False, True], ids=["llama 3.1", "llama 3.2, tied"])
def test_torchtune_gives_the_same_logits(tied, tmp_path):
    factor = 32.0 if tied else 8.0
    model = write_llama(
        tmp_path / "hf",
        **NUMBERS,
        rope_theta=500000.0,
        rope_scaling=scaling(factor),
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
    )
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp", mesh=MeshShape(dp_shard=2, tp=2))
    shutil.rmtree(tmp_path / "hf")
    convert(tmp_path / "dcp", tmp_path / "export", to="hf", shard_bytes=200_000)
    checkpointer = FullModelHFCheckpointer(
        checkpoint_dir=str(tmp_path / "export"),
        checkpoint_files=sorted(p.name for p in (tmp_path / "export").glob("*.safetensors")),
        model_type="LLAMA3_2" if tied else "LLAMA3",
        output_dir=str(tmp_path / "out"),
    )
    build = llama3_2 if tied else llama3_1
    theirs = build(
        vocab_size=301,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=64,
        max_seq_len=8192,
        intermediate_dim=176,
        rope_base=500000,
        norm_eps=model.config.rms_norm_eps,
        scale_factor=int(factor),
    ).eval()
    theirs.load_state_dict(checkpointer.load_checkpoint()["model"])
    tokens = torch.randint(0, 301, (1, len(POSITIONS)), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = theirs(tokens, input_pos=POSITIONS[None])
        expected = model(tokens, position_ids=POSITIONS[None]).logits
        exact = LlamaForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
        noise = (exact(tokens, position_ids=POSITIONS[None]).logits - expected).abs().max()
    assert (found - expected).abs().max() <= 3 * noise
