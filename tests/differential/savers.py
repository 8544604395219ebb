"""Checkpoints of one model as torch's own savers and wrappers write them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class Saver:
    """`save(hf, out)` reads a model and writes a checkpoint of it at `out`, on `ranks` gloo ranks if there are any."""

    save: Callable[[Path, Path], None]
    ranks: int = 0
    name: str = "out"  # of the file or folder that is written
    given: str = ""  # what a user names below it
    is_python_only: bool = False  # no command of titan's can read it; a hint says what to run in Python


def _load(hf: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(hf)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With states of one step, which has left the weights as they were."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
    optimizer.step()
    return optimizer


class _App(Stateful):
    """As in PyTorch's tutorial of DCP."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        model, optimizer = state_dict["model"], state_dict["optim"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


# What is saved of a model: DCP takes each of these, and torch.save most
def _flat(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model)


def _under(key: str, model: nn.Module) -> dict[str, Any]:
    return {key: get_model_state_dict(model)}


def _with_optimizer(model: nn.Module) -> dict[str, Any]:
    optimizer = _optimizer(model)
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 7}


def _app(model: nn.Module) -> dict[str, Any]:
    return {"app": _App(model, _optimizer(model))}


def _dcp(state_of: Callable[[nn.Module], dict[str, Any]], hf: Path, out: Path, *, wrap=None) -> None:
    dcp.save(state_of((wrap or _plain)(_load(hf))), checkpoint_id=str(out), no_dist=not dist.is_initialized())


def _own(model: nn.Module) -> dict[str, Any]:
    return model.state_dict()


def _dcp_async(hf: Path, out: Path) -> None:
    dcp.async_save({"model": _load(hf).state_dict()}, checkpoint_id=str(out)).result()


def _torch(wrap: Callable[[nn.Module], nn.Module], hf: Path, out: Path, *, key: str = "") -> None:
    weights = wrap(_load(hf)).state_dict()
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({key: weights, "epoch": 3} if key else weights, out)


def _plain(model: nn.Module) -> nn.Module:
    return model


def _wrapped_twice(outer: Callable[..., nn.Module], inner: Callable[..., nn.Module], model: nn.Module) -> nn.Module:
    return outer(inner(model))


def _compiled_layers(model: nn.Module) -> nn.Module:
    """As torchtitan compiles: layer by layer."""
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(layer)
    return model


def _checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: "DecoderLayer" in type(module).__name__)
    return model


def _torch_checkpoint_wrapped(hf: Path, out: Path) -> None:
    """The names of checkpoint_wrapper's modules, which its own hook on state_dict would shorten."""
    weights = _load(hf).state_dict()
    torch.save({n.replace(".self_attn", "._checkpoint_wrapped_module.self_attn"): t for n, t in weights.items()}, out)


def _lightning(hf: Path, out: Path, *, attribute: str = "model") -> None:
    """What lightning.Trainer writes of a LightningModule that holds the model as `attribute`."""
    model = _load(hf)
    weights = {f"{attribute}.{name}": weight for name, weight in model.state_dict().items()}
    beside = {"epoch": 1, "global_step": 20, "pytorch-lightning_version": "2.5.1", "loops": {}, "callbacks": {}}
    optimizer = _optimizer(model).state_dict()
    torch.save(beside | {"state_dict": weights, "optimizer_states": [optimizer], "lr_schedulers": []}, out)


def _whole_module(hf: Path, out: Path) -> None:
    torch.save(_load(hf), out)


def _legacy(hf: Path, out: Path) -> None:
    torch.save(_load(hf).state_dict(), out, _use_new_zipfile_serialization=False)


def _dcp_to_torch_save(state_of: Callable[[nn.Module], dict[str, Any]], hf: Path, out: Path) -> None:
    _dcp(state_of, hf, out.with_suffix(".dcp"))
    dcp_to_torch_save(out.with_suffix(".dcp"), out)


def _accelerate(hf: Path, out: Path) -> None:
    """What accelerate's save_state leaves of an FSDP run."""
    _dcp(partial(_under, "model"), hf, out / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": {"step": torch.tensor(1.0)}}, checkpoint_id=str(out / "optimizer_0"), no_dist=True)
    torch.save({}, out / "scheduler.bin")


def _trainer(hf: Path, out: Path) -> None:
    """What transformers' Trainer leaves of a step."""
    _load(hf).save_pretrained(out)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({}, out / name)
    (out / "trainer_state.json").write_text("{}")


def _fully_sharded(model: nn.Module, *, mesh_shape: tuple[int, ...]) -> nn.Module:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


_fsdp2, _hsdp = partial(_fully_sharded, mesh_shape=(2,)), partial(_fully_sharded, mesh_shape=(2, 2))


def _full_state_dict(hf: Path, out: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(_fsdp2(_load(hf)), options=options)
    if dist.get_rank() == 0:
        torch.save(weights, out)


def _a_file_per_rank(hf: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    torch.save(_fsdp2(_load(hf)).state_dict(), out / f"rank_{dist.get_rank()}.pt")


def _fsdp1(kind: StateDictType, hf: Path, out: Path) -> None:
    model = FullyShardedDataParallel(_load(hf), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(model, kind):
        weights = model.state_dict()
    if kind == StateDictType.SHARDED_STATE_DICT:
        dcp.save({"model": weights}, checkpoint_id=str(out))
    elif dist.get_rank() == 0:
        torch.save(weights, out)


_FILE = "out.pt"
SAVERS = {
    "dcp, flat": Saver(partial(_dcp, _flat)),
    "dcp, under model": Saver(partial(_dcp, partial(_under, "model"))),
    "dcp, under state_dict": Saver(partial(_dcp, partial(_under, "state_dict"))),
    "dcp, with an optimizer": Saver(partial(_dcp, _with_optimizer)),
    "dcp, the tutorial's app": Saver(partial(_dcp, _app)),
    "dcp, async_save": Saver(_dcp_async, ranks=1),
    "dcp, compiled": Saver(partial(_dcp, _own, wrap=torch.compile)),
    "dcp, to torch.save, flat": Saver(partial(_dcp_to_torch_save, _flat), name=_FILE),
    "dcp, to torch.save, with an optimizer": Saver(partial(_dcp_to_torch_save, _with_optimizer), name=_FILE),
    "torch.save": Saver(partial(_torch, _plain), name=_FILE),
    "torch.save, under model": Saver(partial(_torch, _plain, key="model"), name=_FILE),
    "torch.save, under model_state_dict": Saver(partial(_torch, _plain, key="model_state_dict"), name=_FILE),
    "torch.save, under module": Saver(partial(_torch, _plain, key="module"), name=_FILE),
    "torch.save, under net": Saver(partial(_torch, _plain, key="net"), name=_FILE),
    "torch.save, compiled": Saver(partial(_torch, torch.compile), name=_FILE),
    "torch.save, compiled, under model": Saver(partial(_torch, torch.compile, key="model"), name=_FILE),
    "torch.save, layers compiled": Saver(partial(_torch, _compiled_layers), name=_FILE),
    "torch.save, activation checkpointing": Saver(partial(_torch, _checkpointed), name=_FILE),
    "torch.save, _checkpoint_wrapped_module": Saver(_torch_checkpoint_wrapped, name=_FILE),
    "torch.save, DataParallel": Saver(partial(_torch, nn.DataParallel), name=_FILE),
    "torch.save, DataParallel of compiled": Saver(
        partial(_torch, partial(_wrapped_twice, nn.DataParallel, torch.compile)), name=_FILE
    ),
    "torch.save, the whole module": Saver(_whole_module, name=_FILE, is_python_only=True),
    "torch.save, legacy": Saver(_legacy, name=_FILE, is_python_only=True),
    "safetensors' save_model": Saver(lambda hf, out: save_model(_load(hf), str(out)), name="out.safetensors"),
    "Lightning": Saver(_lightning, name="out.ckpt"),
    "Lightning, another attribute": Saver(partial(_lightning, attribute="llm"), name="out.ckpt"),
    "accelerate, its folder": Saver(_accelerate),
    "accelerate, the model's folder": Saver(_accelerate, given="pytorch_model_fsdp_0"),
    "transformers' Trainer": Saver(_trainer),
    "DDP": Saver(partial(_torch, DistributedDataParallel), ranks=2, name=_FILE),
    "DDP, under model": Saver(partial(_torch, DistributedDataParallel, key="model"), ranks=2, name=_FILE),
    "DDP, dcp": Saver(partial(_dcp, _own, wrap=DistributedDataParallel), ranks=2),
    "DDP of compiled": Saver(
        partial(_torch, partial(_wrapped_twice, DistributedDataParallel, torch.compile)), ranks=2, name=_FILE
    ),
    "compiled DDP": Saver(
        partial(_torch, partial(_wrapped_twice, torch.compile, DistributedDataParallel)), ranks=2, name=_FILE
    ),
    "FSDP2, flat": Saver(partial(_dcp, _flat, wrap=_fsdp2), ranks=2),
    "FSDP2, with an optimizer": Saver(partial(_dcp, _with_optimizer, wrap=_fsdp2), ranks=2),
    "FSDP2, the tutorial's app": Saver(partial(_dcp, _app, wrap=_fsdp2), ranks=2),
    "FSDP2, full_state_dict": Saver(_full_state_dict, ranks=2, name=_FILE),
    "FSDP2, a file per rank": Saver(_a_file_per_rank, ranks=2, is_python_only=True),
    "FSDP1, full": Saver(partial(_fsdp1, StateDictType.FULL_STATE_DICT), ranks=2, name=_FILE),
    "FSDP1, sharded": Saver(partial(_fsdp1, StateDictType.SHARDED_STATE_DICT), ranks=2),
    "HSDP, flat": Saver(partial(_dcp, _flat, wrap=_hsdp), ranks=4),
    "HSDP, with an optimizer": Saver(partial(_dcp, _with_optimizer, wrap=_hsdp), ranks=4),
}
