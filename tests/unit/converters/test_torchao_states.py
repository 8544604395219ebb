"""A DCP whose optimizer states are torchao's: named as such, not called damaged, and never moved by guess."""

import pytest
import torch
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8
from transformers import LlamaConfig, LlamaForCausalLM

from converters.common.errors import UnsupportedError
from converters.inspect import inspect_checkpoint
from converters.verify import verify
from tests.doors import convert, reshard
from tests.unit.converters.samples import save_dcp

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
)  # fmt: skip


@pytest.mark.parametrize("kind", [OptimState8bit, OptimState4bit, OptimStateFp8])
def test_states_are_named_and_not_called_damaged(kind, tmp_path):
    weights = LlamaForCausalLM(CONFIG).state_dict()
    made = kind.zeros((64, 64)) if kind is OptimStateFp8 else kind.zeros((64, 64), True)
    moments = {n: made if t.numel() == 4096 else torch.zeros_like(t) for n, t in weights.items()}
    states = {name: {"exp_avg": tensor, "step": torch.tensor(1.0)} for name, tensor in moments.items()}
    folder = save_dcp(tmp_path / "dcp", {"model": weights, "optimizer": {"state": states}})
    CONFIG.save_pretrained(folder)
    name = f"quantized by torchao \\({kind.__name__}\\)"
    report = verify(folder)
    files = next(check for check in report.checks if check.name == "files")
    assert report.ok and files.outcome == "warning" and len(files.problems) == 9
    assert f"quantized by torchao ({kind.__name__})" in files.problems[0]
    with pytest.raises(
        UnsupportedError, match=f"9 tensors are not stored as .metadata lists them(?s:.*){name}"
    ) as error:
        reshard(folder, tmp_path / "out", dry_run=True)
    assert error.value.tries == ("--drop optimizer",)
    reshard(folder, tmp_path / "out", drop=["optimizer"])
    convert(folder, tmp_path / "hf", to="hf")
    assert any("9 tensors are smaller in the files" in note for note in inspect_checkpoint(folder).notes)
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    codes = data.index(b"OptimState") + 3000  # in or behind the codes of the first state
    data[codes] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    broken = verify(folder)
    assert not broken.ok and any("CRC32" in text for check in broken.checks for text in check.problems)
