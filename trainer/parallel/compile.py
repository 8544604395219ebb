"""torch.compile, block by block: every layer runs the same compiled code, so that it is made once and not per layer.

torch is imported inside functions: what cannot be combined is checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.families.base import ModelArgs
from converters.layout import MeshShape
from trainer.config.sections import Compile, Config
from trainer.stages import SPLIT_BACKWARD_SCHEDULES

if TYPE_CHECKING:
    import torch
    from torch import nn


def compiles(settings: Compile, component: str) -> bool:
    return settings.enable and component in settings.components


def compile_problems(config: Config, args: ModelArgs, dims: MeshShape) -> list[str]:
    """What compiled blocks cannot do together with the rest of the config."""
    schedule = config.parallelism.pipeline_parallel_schedule
    if compiles(config.compile, "model") and dims.pp > 1 and schedule in SPLIT_BACKWARD_SCHEDULES:
        return [
            f"schedule {schedule} splits the backward pass, which torch cannot do with compiled blocks"
            ' (pytorch#161904); nearest: schedule Interleaved1F1B, or compile.components = ["loss"]'
        ]
    return []


def compile_machine_problems(config: Config, device: torch.device) -> list[str]:
    """An unknown backend, and a compiler that is missing."""
    if not config.compile.enable or not config.compile.components:
        return []
    import torch

    backend = config.compile.backend
    if backend not in torch.compiler.list_backends(exclude_tags=None):
        useful = {*torch.compiler.list_backends(), "aot_eager", "eager"}  # the others are for those who debug torch
        return [f"compile.backend = {backend!r} is no backend of torch here; there are {', '.join(sorted(useful))}"]
    problems = []
    if backend == "inductor" and (reason := why_inductor_cannot(device)):
        problems.append(f"compile.backend = inductor: {reason}; nearest: --compile.backend aot_eager")
    if _mixes_up_what_is_saved(config, device):
        problems.append(
            "activation_checkpoint of whole layers, compile and tensor parallelism: this torch, on a CPU, mixes up what"
            " a layer keeps for backward; nearest: selective_ac_option = op, or mode = memory_budget"
        )
    return problems


def _mixes_up_what_is_saved(config: Config, device: torch.device) -> bool:
    """torch 2.13 keeps DTensors' mesh at the end of what backward gets, and then puts a CPU's random state behind it.

    A GPU's random state goes another way, and earlier torch keeps no mesh.
    """
    from torch.distributed.device_mesh import DeviceMesh

    recompute = config.activation_checkpoint
    is_whole = recompute.mode == "full" or (recompute.mode == "selective" and recompute.selective_ac_option != "op")
    is_tp = config.parallelism.tensor_parallel_degree > 1
    keeps_mesh = any("Opaque" in base.__name__ for base in DeviceMesh.__mro__)
    return device.type == "cpu" and is_tp and is_whole and compiles(config.compile, "model") and keeps_mesh


def why_inductor_cannot(device: torch.device) -> str | None:
    """What is missing to compile for this device, None where nothing is."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda":
        return None if has_triton() else "it writes Triton kernels, and triton is not installed or knows no such GPU"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "it writes C++ for a CPU, and no C++ compiler is found (CXX, or g++ on the PATH)"
    return None


def apply_compile(model: nn.Module, settings: Compile) -> None:
    """Compile each layer's `forward` in place: FQNs stay, and so does what hooks around a layer, as FSDP does later.

    A layer that compiles only in pieces is an error, not a slow run. Shapes are compiled as they come (training and
    validation, with and without gradients): code for any length would be slower in the one that matters.
    """
    import torch

    for layer in model.layers.values():
        layer.forward = torch.compile(layer.forward, backend=settings.backend, fullgraph=True, dynamic=False)
