"""Rebuild in titan's model how torchtitan built a published run at its date."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel
from torch.utils.checkpoint import _CachedTorchDispatchMode

import titan_tools.memory.trace.capture
import trainer.build
import trainer.models.latent_attention
import trainer.next_token.parts
import trainer.parallel.activation_checkpoint
import trainer.parallel.expert_parallel
import trainer.parallel.tensor
from tests.published_memory.historical_experts import (
    KEPT_EXCHANGES,
    compile_submodules,
    complex_rotate,
    narrow_gate,
    padded_experts,
    prefetch_groups,
    shard_experts,
)
from tests.published_memory.historical_modules import (
    LossOfLogits,
    composite_rms_norm,
    grouped_qwen_attention,
    llama_attention,
    llama_freqs_cis,
    python_rms_norm,
    qwen_attention,
    qwen_rope_cache,
    scatter_added_experts,
)
from tests.published_memory.history import HistoricalBuild
from titan_tools.memory.trace.recorder import Recorder
from trainer.config.sections import Compile, Optimizer, Training
from trainer.loss.install import install_loss
from trainer.models.attention import GroupedQueryAttention
from trainer.models.moe import Gate, MoE, grouped_swiglu
from trainer.models.rope import RotaryAngles
from trainer.parallel.activation_checkpoint import _matrix_products
from trainer.parallel.compile import compiles
from trainer.parallel.expert_exchange import EXCHANGES
from trainer.parallel.expert_shards import ShardedExperts
from trainer.train_model import TrainModel

aten = torch.ops.aten
_label_parameters = titan_tools.memory.trace.capture._label_parameters


@contextmanager
def historical_build(build: HistoricalBuild, *, tp: int) -> Iterator[None]:
    """Build captured runs as torchtitan built them."""
    norm = {"python": python_rms_norm, "composite": composite_rms_norm, "fused": nn.RMSNorm.forward}[build.norm]
    attention = llama_attention
    if build.norms_queries:
        attention = qwen_attention if build.repeats_keys else grouped_qwen_attention
    with ExitStack() as patches:
        for owner, name, value in (
            (nn.RMSNorm, "forward", norm),
            (GroupedQueryAttention, "forward", attention),
            (RotaryAngles, "forward", qwen_rope_cache if build.norms_queries else llama_freqs_cis),
            (trainer.models.latent_attention, "rotate", complex_rotate),
            (MoE, "forward", padded_experts if build.pads_experts else scatter_added_experts),
            (trainer.next_token.parts, "install_loss", partial(_install_loss, build)),
            (trainer.build, "apply_fsdp", _ends_in_root(build) if build.has_ends_in_root else _separate_groups(build)),
            (trainer.parallel.activation_checkpoint, "_kept_operations", _kept_operations),
            (trainer.parallel.tensor, "RowsOfVocabulary", _split_embedding),
            (titan_tools.memory.trace.capture, "build_optimizer", _without_states),
            (titan_tools.memory.trace.capture, "_label_parameters", _label_after_steps),
        ):
            patches.enter_context(patch.object(owner, name, value))
        if build.pads_experts:
            compiled = torch.compile(grouped_swiglu, fullgraph=True, dynamic=False)
            patches.enter_context(patch.object(Gate, "forward", narrow_gate))
            patches.enter_context(patch.object(trainer.build, "apply_compile", compile_submodules))
            recomputes = _without_counting_what_is_not_kept(_CachedTorchDispatchMode.__torch_dispatch__)
            patches.enter_context(patch.object(_CachedTorchDispatchMode, "__torch_dispatch__", recomputes))
            if build.is_model_compiled:
                patches.enter_context(patch.object(trainer.parallel.expert_parallel, "grouped_swiglu", compiled))
        patches.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")  # as in our own
        # torchtitan's rotation is a complex product, which Inductor leaves to ATen
        warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex")
        if tp > 1:
            patches.enter_context(loss_parallel())
        yield


def _ends_in_root(build: HistoricalBuild) -> Callable[..., None]:
    """Each block in its own group; embeddings, norm and output in the root's, which FSDP2 does not reshard."""

    def apply_fsdp(model: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool, **policy) -> None:
        shared = _shared(mesh, **policy)
        last = len(model.layers) - 1
        for number, layer in enumerate(model.layers.values()):
            is_kept = number == last and build.is_last_block_kept
            fully_shard(layer, **shared, reshard_after_forward=reshard_after_forward and not is_kept)
        fully_shard(model, **shared, reshard_after_forward=False)

    return apply_fsdp


def _separate_groups(build: HistoricalBuild) -> Callable[..., None]:
    """#1625. One parameter cannot be in two groups, as torchtitan's tied ends were: it tied them afterwards."""

    def apply_fsdp(
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        reshard_after_forward: bool,
        reshard_last: bool,
        experts: ShardedExperts | None = None,
        **policy,
    ) -> None:
        shared = _shared(mesh, **policy)
        is_nested = experts is not None and build.pads_experts
        if is_nested:
            shard_experts(model, experts, shared | {"reshard_after_forward": reshard_after_forward})

        def shard(modules: nn.Module | list[nn.Module], **reshard: bool) -> None:
            if experts is None or is_nested:
                fully_shard(modules, **shared, **reshard)
            else:  # #2281: experts in their layer's group, over their own mesh
                experts.shard(modules, mesh, {"mp_policy": shared["mp_policy"], **reshard})

        ends = [module for module in (model.norm, model.output) if module is not None]
        alone = [model.tok_embeddings, *model.layers.values()]
        if model.args.tied and model.tok_embeddings is not None and model.output is not None:
            ends.append(alone.pop(0))
        for module in filter(None, alone):
            shard(module, reshard_after_forward=reshard_after_forward)
        if ends:
            shard(ends, reshard_after_forward=reshard_last)
        shard(model)
        if is_nested:
            prefetch_groups(model)
        model.tie()

    return apply_fsdp


def _shared(mesh: DeviceMesh, *, param_dtype: torch.dtype, reduce_dtype: torch.dtype, **unused) -> dict:
    return {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}


def _install_loss(
    build: HistoricalBuild,
    part: nn.Module,
    training: Training,
    compile: Compile,
    *,
    tp_mesh: DeviceMesh | None,
    **settings: bool,
) -> None:
    """In place of trainer/loss/install.py's."""
    if part.output is None or build.has_output_in_chunks:
        install_loss(part, training, compile, tp_mesh=tp_mesh, **settings)
        return
    loss = LossOfLogits(part.forward, tp_mesh, build)
    if compiles(compile, "loss"):
        loss.cross_entropy = torch.compile(loss.cross_entropy, backend=compile.backend)
    part.forward = loss


def _kept_operations() -> frozenset:
    """_save_list of torchtitan's parallelize_llama.py: all-gathers are not in it."""
    return frozenset(
        {
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_flash_attention.default,
            torch.ops._c10d_functional.reduce_scatter_tensor.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten.max.default,
            aten.topk.default,  # of experts alone
            *EXCHANGES,
            *KEPT_EXCHANGES,
        }
    )


def _without_counting_what_is_not_kept(recompute: Callable[..., Any]) -> Callable[..., Any]:
    """In torch of that time recomputation counted only the operations whose results it keeps.

    Gathered experts are not gathered again, so other operations differ.
    """
    kept = _kept_operations() | _matrix_products()

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in kept:
            return func(*args, **(kwargs or {}))
        return recompute(mode, func, types, args, kwargs)

    return dispatch


def _split_embedding() -> RowwiseParallel:
    """Until #3468 (June 2026)."""
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))


def _without_states(named_parameters: Mapping[str, nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer:
    """The first step creates the states."""
    is_fused = settings.implementation == "fused"
    return torch.optim.AdamW(list(named_parameters.values()), lr=settings.lr, fused=is_fused, foreach=not is_fused)


def _label_after_steps(model: TrainModel, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """Label the states too, once the first step has created them: only labelled ones can be expanded."""
    _label_parameters(model, optimizer, recorder)
    optimizer.register_step_post_hook(lambda *_: _label_parameters(model, optimizer, recorder))
