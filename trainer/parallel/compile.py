"""torch.compile per block: all blocks of a kind share the compiled code, so that it is compiled once.

torch is imported inside functions, so that settings are checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.config.sections import ActivationCheckpoint, Compile
from trainer.parallel.stages import SPLIT_BACKWARD_SCHEDULES
from trainer.ranks.machine import Device

if TYPE_CHECKING:
    from trainer.models.units import ModelPart


def compiles(settings: Compile, component: str) -> bool:
    return settings.enable and component in settings.components


def compile_problems(settings: Compile, *, schedule: str | None) -> list[str]:
    """An unknown backend; pipeline schedules that compiled blocks do not support, None without a pipeline."""
    return [*_backend_problems(settings), *_schedule_problems(settings, schedule)]


_BACKENDS = ("inductor", "aot_eager", "eager")  # that every torch has


def _backend_problems(settings: Compile) -> list[str]:
    backend = settings.backend
    if not settings.enable or not settings.components or backend in _BACKENDS:
        return []
    try:
        import torch
    except ModuleNotFoundError:  # `titan config check` then says that it could not ask torch
        return []
    if backend in torch.compiler.list_backends(exclude_tags=None):  # takes seconds
        return []
    useful = {*torch.compiler.list_backends(), *_BACKENDS}  # the others are for debugging torch
    return [f"compile.backend = {backend!r} is not a backend of this torch; there are {', '.join(sorted(useful))}"]


def _schedule_problems(settings: Compile, schedule: str | None) -> list[str]:
    if compiles(settings, "model") and schedule in SPLIT_BACKWARD_SCHEDULES:
        return [
            f"schedule {schedule} splits the backward pass, which torch does not support with compiled blocks"
            ' (pytorch#161904); nearest: schedule Interleaved1F1B, or compile.components = ["loss"]'
        ]
    return []


def compile_machine_problems(
    settings: Compile, recompute: ActivationCheckpoint, device: Device, *, tp: int, ep: int = 1
) -> list[str]:
    """A missing compiler, or a combination that this version of torch compiles wrongly."""
    if not settings.enable or not settings.components:
        return []
    import torch

    backend = settings.backend
    problems = []
    if backend == "inductor" and (reason := why_inductor_cannot(device)):
        problems.append(f"compile.backend = inductor: {reason}; nearest: --compile.backend aot_eager")
    version: Any = torch.__version__  # a TorchVersion, which compares with tuples
    if backend == "eager" and compiles(settings, "model") and version < (2, 13):
        problems.append(
            f"compile.backend = eager: torch {version} loses gradients of functions that return one of"
            " their inputs, as collectives do (pytorch#180642); nearest: --compile.backend aot_eager"
        )
    if compiles(settings, "model") and ep > 1:
        from trainer.parallel.expert_shards import SHARDS_WITH_LAYER

        if not SHARDS_WITH_LAYER:
            problems.append(
                f"compile with expert parallelism needs torch 2.13, not {torch.__version__}: before it FSDP's hooks on"
                ' experts are inside of a layer; nearest: compile.components = ["loss"]'
            )
    if compiles(settings, "model") and tp > 1 and _confuses_saved_tensors(recompute, device):
        problems.append(
            "activation_checkpoint of whole layers, compile and tensor parallelism: this torch, on a CPU, mixes up the"
            " tensors saved for backward; nearest: selective_ac_option = op, or mode = memory_budget"
        )
    return problems


def _confuses_saved_tensors(recompute: ActivationCheckpoint, device: Device) -> bool:
    """Whether this torch mixes up the inputs of a compiled backward under tensor parallelism.

    torch 2.13 saves a DTensor's mesh as the last input of backward, and then appends a CPU's random state to it.
    A GPU's random state is saved elsewhere, earlier versions save no mesh, and 2.14 saves no random state for attention
    without dropout, which is the one operation of a model that could need it.
    """
    is_whole = recompute.mode == "full" or (recompute.mode == "selective" and recompute.selective_ac_option != "op")
    return device.type == "cpu" and is_whole and _saves_meshes_and_random_states()


def _saves_meshes_and_random_states() -> bool:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.fx import Graph, GraphModule
    from torch.utils.checkpoint import CheckpointPolicy

    try:
        from torch._functorch.partitioners import has_recomputable_rng_ops
        from torch._library.opaque_object import is_opaque_type
    except ImportError:  # newer than 2.15
        return False
    graph = Graph()
    inputs = tuple(map(graph.placeholder, "qkv"))
    attention = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, inputs)
    attention.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return is_opaque_type(DeviceMesh) and has_recomputable_rng_ops(GraphModule(torch.nn.Module(), graph))


def why_inductor_cannot(device: Device) -> str | None:
    """Why inductor cannot compile for this device; None if it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda":
        return None if has_triton() else "it needs Triton, which is not installed or does not support this GPU"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "it needs a C++ compiler for a CPU, and none is found (CXX, or g++ on the PATH)"
    return None


def apply_compile(model: ModelPart, settings: Compile) -> None:
    """Compile each block's `forward` in place: FQNs and hooks around blocks, as FSDP's, do not change.

    Graph breaks are errors. Each shape (training and validation, with and without gradients) is compiled separately:
    code for dynamic shapes would be slower.
    """
    import torch

    from trainer.models.units import blocks_of

    for _, module, *_ in blocks_of(model):
        module.forward = torch.compile(module.forward, backend=settings.backend, fullgraph=True, dynamic=False)
