"""What else converts a Hugging Face folder to DCP, each in a process of its own, for readme.py.

python scripts/bench/convert_peers.py (transformers|torchtitan) FOLDER OUT

`transformers` builds its model from the folder and saves the model's state dict. `torchtitan` takes the steps of its
convert_from_hf.py: build the model, which is float32, load through Hugging Face's names, translate, save. Its modules
are those of torchtitan 0.2.2 in TITAN_TORCHTITAN, by default where scripts/test_slow.sh installs it, without what its
packages import for training.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

RELEASE = Path(os.environ.get("TITAN_TORCHTITAN") or Path(__file__).resolve().parents[2] / ".venv" / "torchtitan")


def by_transformers(folder: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    dcp.save(model.state_dict(), checkpoint_id=out)


@torch.inference_mode()
def by_torchtitan(folder: Path, out: Path) -> None:
    args, model, adapter = torchtitans_llama()
    config = json.loads((folder / "config.json").read_text())
    of_model = args.TransformerModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        ffn_dim_multiplier=config["intermediate_size"] / (8 * config["hidden_size"] / 3),
        multiple_of=256,
        rope_theta=config["rope_theta"],
    )
    names = adapter.Llama3StateDictAdapter(of_model, None)
    weights = model.Transformer(of_model).state_dict()
    loaded = names.to_hf({name: tensor for name, tensor in weights.items() if name != "freqs_cis"})
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(path=str(folder)))
    dcp.save(names.from_hf(loaded), checkpoint_id=out)


def torchtitans_llama() -> tuple[Any, ...]:
    """Its modules of arguments, model and names."""
    if not (RELEASE / "torchtitan-0.2.2.dist-info").is_dir():
        sys.exit(f"pip install --no-deps --target {RELEASE} torchtitan==0.2.2")

    def package(name: str) -> ModuleType:  # without running its __init__
        made = sys.modules[name] = ModuleType(name)
        made.__path__ = [str(RELEASE / name.replace(".", "/"))]
        return made

    for name in ("", ".components", ".config", ".models", ".models.llama3", ".models.llama3.model", ".protocols"):
        package(f"torchtitan{name}")
    config, training = sys.modules["torchtitan.config"], package("torchtitan.protocols.train_spec")
    config.JobConfig = import_module("torchtitan.config.job_config").JobConfig  # type: ignore[attr-defined]
    training.ModelProtocol = import_module("torchtitan.protocols.model").ModelProtocol  # type: ignore[attr-defined]
    return tuple(
        import_module(f"torchtitan.models.llama3.model.{name}") for name in ("args", "model", "state_dict_adapter")
    )


if __name__ == "__main__":
    {"transformers": by_transformers, "torchtitan": by_torchtitan}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
