"""Float8 training with torchao: which Linears are converted, what FSDP all-gathers, and unsupported combinations.

Weights and checkpoints stay in high precision under the same FQNs. torch and torchao are imported inside functions, so
that settings are checked without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from math import ceil
from typing import TYPE_CHECKING, Any

from converters.families.args import DecoderArgs, ModelArgs, is_tied
from converters.families.parameters import Parameter
from converters.layout.mesh_shape import MeshShape
from trainer.config.sections import Float8, Model, Training
from trainer.loss.registry import CHUNKED
from trainer.models.tensor_plan import TensorStyle
from trainer.parallel.ddp import is_ddp
from trainer.ranks.machine import Device

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

    from trainer.models.units import ModelPart

CONVERTER = "quantize.linear.float8"
_SECTION = CONVERTER
_PARAM_DTYPE = "training.mixed_precision_param"
_OUTPUT = "output"
_AUTO_FILTER = "auto_filter_small_kn"
_MULTIPLE = 16  # divides both dims of a weight, and the tokens: required by the hardware


def float8_filters(settings: Float8, training: Training) -> tuple[str, ...]:
    """Modules to skip, as in `filter_fqns`. With the chunked loss the output's casts run uncompiled, for each chunk:
    about 100 ms of a step of 0.5 s (8B width, 16,384 tokens, 8 chunks on an H200; computed from the bytes).
    """
    if settings.filter_fqns is None:
        return (_OUTPUT,) if training.loss == CHUNKED else ()
    return settings.filter_fqns


def float8_notes(settings: Float8, training: Training, args: ModelArgs) -> list[str]:
    """Notes on the output projection, for the beginning of a run."""
    if training.loss != CHUNKED or is_tied(args):
        return []
    if settings.filter_fqns is None:
        return [
            "float8: `output` is not converted, because with the chunked loss its casts run uncompiled, for each chunk;"
            f" {_SECTION}.filter_fqns = [] converts it too"
        ]
    if _names(settings.filter_fqns, _OUTPUT):
        return []
    return [
        "float8: with the chunked loss the casts of `output` run uncompiled, for each chunk;"
        f' {_SECTION}.filter_fqns = ["{_OUTPUT}"] leaves it in high precision'
    ]


def _names(filters: Iterable[str], fqn: str) -> bool:
    return any(part in fqn for part in filters)


def is_float8(model: Model) -> bool:
    return CONVERTER in model.converters


def float8_problems(
    settings: Float8,
    training: Training,
    args: DecoderArgs,
    dims: MeshShape,
    *,
    microbatch_size: int,
    loss_chunks: int,
    compiles_model: bool,
    uses_fsdp: bool,
) -> list[str]:
    """Settings that float8 cannot be combined with. `loss_chunks`: of one forward pass, for the chunked loss."""
    gathers, precomputes = settings.enable_fsdp_float8_all_gather, settings.precompute_float8_dynamic_scale_for_fsdp
    problems = []
    if _is_rowwise(settings) and (gathers or precomputes):
        problems.append(
            f"{_SECTION}.recipe_name = {settings.recipe_name} has a scale for each row, float8 all-gather and"
            ' precomputed scales one for a whole weight; nearest: recipe_name = "tensorwise", or both of them false'
        )
    if precomputes and not gathers:
        problems.append(
            f"{_SECTION}.precompute_float8_dynamic_scale_for_fsdp computes what float8 all-gather uses;"
            " nearest: enable_fsdp_float8_all_gather = true"
        )
    if gathers and not uses_fsdp:
        why, nearest = "each rank holds whole weights in the dtype that it computes in", f"{_PARAM_DTYPE} = bfloat16"
        if is_ddp(dims):
            why, nearest = (
                "ranks hold whole copies (DDP)",
                f"parallelism.data_parallel_shard_degree = {dims.world_size}",
            )
        problems.append(
            f"{_SECTION}.enable_fsdp_float8_all_gather needs FSDP, and nothing is gathered where {why};"
            f" nearest: {nearest}, or false"
        )
    if gathers and training.enable_cpu_offload:
        problems.append(
            f"{_SECTION}.enable_fsdp_float8_all_gather would cast to float8 on the CPU, where CPU offload keeps the"
            " weights; nearest: training.enable_cpu_offload = false, or no float8 all-gather"
        )
    if settings.emulate and compiles_model:
        problems.append(
            f"{_SECTION}.emulate does not work with compiled blocks;"
            ' nearest: compile.components = ["loss"], or emulate = false on a GPU that has float8'
        )
    if _AUTO_FILTER in float8_filters(settings, training) and settings.recipe_name == "rowwise_with_gw_hp":
        problems.append(
            f"{_SECTION}.filter_fqns: torchao has no {_AUTO_FILTER} for recipe rowwise_with_gw_hp;"
            ' nearest: name the modules, or recipe_name = "rowwise"'
        )
    if not settings.emulate:
        num_tokens = microbatch_size * training.seq_len // dims.cp
        if num_tokens % _MULTIPLE:
            problems.append(
                f"float8 products need a multiple of {_MULTIPLE} tokens, and a pass of a rank has {num_tokens}"
                f" ({microbatch_size} samples of {training.seq_len // dims.cp}); nearest: a training.seq_len that is a"
                f" multiple of {_MULTIPLE * dims.cp}"
            )
        else:
            problems += _chunk_problems(settings, training, args, dims, num_tokens, loss_chunks)
    return problems


def _chunk_problems(
    settings: Float8, training: Training, args: DecoderArgs, dims: MeshShape, num_tokens: int, num_chunks: int
) -> list[str]:
    """A chunked loss runs the output projection on one chunk of the tokens at a time."""
    is_possible = args.dim % _MULTIPLE == 0 and args.vocab_size % (dims.tp * _MULTIPLE) == 0
    is_converted = is_possible and not args.tied and not _names(float8_filters(settings, training), _OUTPUT)
    if training.loss != CHUNKED or not is_converted or ceil(num_tokens / num_chunks) % _MULTIPLE == 0:
        return []
    nearest = max(n for n in range(1, num_chunks + 1) if ceil(num_tokens / n) % _MULTIPLE == 0)
    return [
        f"float8 products need a multiple of {_MULTIPLE} tokens, and training.loss_chunks = {num_chunks}"
        f"{'' if training.loss_chunks else ' (chosen by size)'} splits"
        f' {num_tokens} differently; nearest: training.loss_chunks = {nearest}, or {_SECTION}.filter_fqns = ["output"]'
    ]


def float8_machine_problems(settings: Float8, device: Device) -> list[str]:
    """A missing torchao, or a device without float8 products."""
    if find_spec("torchao") is None:
        return [f"model.converters has {CONVERTER}, which needs torchao; pip install 'torchao>=0.15'"]
    if settings.emulate:
        return []
    needed = capability_needed(settings)
    recipe = settings.recipe_name or "tensorwise"
    wanted = f"float8 ({recipe}) needs a GPU of compute capability {needed[0]}.{needed[1]} or higher"
    nearest = f"nearest: {_SECTION}.emulate = true, which is slow"
    if device.type != "cuda":
        return [f"{wanted}; {nearest}"]
    import torch

    has = torch.cuda.get_device_capability()  # of the current device
    return [] if has >= needed else [f"{wanted}, this one has {has[0]}.{has[1]}; {nearest}"]


def capability_needed(settings: Float8) -> tuple[int, int]:
    """The compute capability that these products need."""
    return (9, 0) if _is_rowwise(settings) else (8, 9)


def _is_rowwise(settings: Float8) -> bool:
    return settings.recipe_name in ("rowwise", "rowwise_with_gw_hp")


def apply_float8(
    model: ModelPart,
    settings: Float8,
    parameters: Sequence[Parameter],
    *,
    filters: Sequence[str],
    tp: int,
    compiles_model: bool,
) -> None:
    """Replace the Linears of a model on the meta device with torchao's, whose products are in float8.

    All but: those that `filters` (of float8_filters) name by a part of their FQN, those whose dims (of each
    tensor-parallel rank) are not multiples of 16, and an output that is tied, because its weight is the embedding's.
    """
    for name in ("torchao", "torch.utils._pytree"):  # about C++ parts and registrations that training does not use
        logging.getLogger(name).setLevel(logging.ERROR)
    from torchao.float8 import convert_to_float8_training

    is_chosen = _module_filter(settings, filters, weight_shapes(parameters, tp))
    convert_to_float8_training(model, config=_torchao_config(settings), module_filter_fn=is_chosen)
    model.tie()
    if settings.recipe_name == "rowwise" and compiles_model:
        import torch._inductor.config

        # otherwise the compiler computes scales and scaled values in different precision (pytorch#150859)
        torch._inductor.config.emulate_precision_casts = True


def _torchao_config(settings: Float8) -> Any:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    return replace(
        Float8LinearConfig.from_recipe_name(settings.recipe_name or "tensorwise"),
        enable_fsdp_float8_all_gather=settings.enable_fsdp_float8_all_gather,
        emulate=settings.emulate,
    )


def _module_filter(
    settings: Float8, filters: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> Callable[[nn.Module, str], bool]:
    """`shapes`: of the weights that may be converted, by module FQN, as a tensor-parallel rank holds them."""
    named = [part for part in filters if part != _AUTO_FILTER]
    is_large = _gains_by_size(settings) if len(named) < len(filters) else lambda module, fqn: True

    def is_chosen(module: nn.Module, fqn: str) -> bool:
        is_possible = fqn in shapes and all(size % _MULTIPLE == 0 for size in shapes[fqn])
        return is_possible and not _names(named, fqn) and is_large(module, fqn)

    return is_chosen


def _gains_by_size(settings: Float8) -> Callable[[nn.Module, str], bool]:
    """torchao's own thresholds, measured on H100s."""
    from torchao.float8 import _auto_filter_for_recipe

    is_large: Callable[[nn.Module, str], bool] = _auto_filter_for_recipe(
        settings.recipe_name or "tensorwise", filter_fqns=[]
    )
    return is_large


def weight_shapes(parameters: Iterable[Parameter], tp: int) -> dict[str, tuple[int, ...]]:
    """Module FQN → shape on a tensor-parallel rank, of the linear layers; a tied output is the embedding's weight."""
    return {
        p.module: tuple(size // tp if dim == p.tp_dim else size for dim, size in enumerate(p.shape))
        for p in parameters
        if p.is_linear_weight
    }


def float8_styles(
    model: nn.Module, plan: Mapping[str, TensorStyle], settings: Float8, *, device_type: str
) -> dict[str, ParallelStyle]:
    """Tensor-parallel styles that cast to float8 before the all-gather, for modules that support it.

    One scale for a tensor travels with it, many do not: so for tensorwise scaling only. Gloo has no float8: there
    (emulated) the same numbers are gathered in high precision, because a maximum is the same before and after.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    if device_type == "cpu" or _is_rowwise(settings):
        return {}
    converted = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    styles: dict[str, ParallelStyle] = {}
    for fqn, style in plan.items():
        if style is TensorStyle.COLUMNS and fqn in converted:
            styles[fqn] = Float8ColwiseParallel()
        elif style is TensorStyle.ROWS and fqn in converted:
            styles[fqn] = Float8RowwiseParallel(output_layouts=Shard(1))
        elif style is TensorStyle.GATHER_SEQUENCE:
            readers = {other for other, s in plan.items() if s is TensorStyle.COLUMNS and other.startswith(f"{fqn}.")}
            if readers <= converted:  # a Linear in high precision cannot read float8
                styles[fqn] = PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return styles


def scale_weights(parts: Iterable[nn.Module]) -> None:
    """Compute the scales of all weights that FSDP gathers in float8, with one all-reduce per part, after an update."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)


def without_float8(tensor: Tensor) -> Tensor:
    """A weight as a plain tensor or DTensor over the same memory, without the wrapper for float8 all-gather.

    The wrapper cannot be saved as safetensors, nor loaded without torchao.
    """
    from torch.distributed.tensor import DTensor

    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "fsdp_pre_all_gather"):
        return tensor
    plain: Tensor = local._tensor
    if not isinstance(tensor, DTensor):
        return plain
    return DTensor.from_local(
        plain,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
