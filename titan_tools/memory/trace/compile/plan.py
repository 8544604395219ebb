"""torch.compile within a trace: Inductor plans the memory of code for a GPU, and the step runs by that plan.

Dynamo, AOTAutograd and its partitioner run as in training, on fake tensors. Inductor then fuses, orders and reuses
buffers as for a GPU, and the code that it writes to call its kernels is run without them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from titan_tools.memory.trace.compile.kept import compiled_code_kept
from titan_tools.memory.trace.kernels.kernels import Kernels
from titan_tools.memory.trace.record.recorder import Recorder
from trainer.config.sections import Config

_TOLD_OTHERWISE = (
    "torch._higher_order_ops.wrap",  # advice on how to write models that are checkpointed
    "torch._subclasses.fake_tensor",  # the traceback of an error that is raised, too
)


@contextmanager
def compile_traced(config: Config, kernels: Kernels, recorder: Recorder) -> Iterator[None]:
    """Within, what a config compiles is traced as compiled. Does nothing, and imports nothing, without `compile`.

    The backend is one of coverage.py's: what inductor writes is run as below, aot_eager and eager run as they are.
    """
    if not config.compile.enable or not config.compile.components:
        yield
        return
    import torch._dynamo
    import torch._functorch.config
    import torch._functorch.partitioners as partitioners

    from titan_tools.memory.trace.compile.failures import compiler_failures_told

    with ExitStack() as stack:
        stack.enter_context(compiler_failures_told())
        stack.enter_context(compiled_code_kept(config))
        stack.enter_context(_compiling_not_recorded(recorder))
        # Code for any length, made where a second one comes, holds what code for that length would.
        # Torch collects garbage after it compiles, also here: else cycles keep tensors of the first step in the next.
        stack.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(patch.object(partitioners, "functionalize_rng_ops", _without_random_state))
        for name in _TOLD_OTHERWISE:
            stack.enter_context(patch.object(logging.getLogger(name), "disabled", True))
        if config.compile.backend == "inductor":
            from titan_tools.memory.trace.compile.async_tensor import async_tensor_traced

            stack.enter_context(_planned_by_inductor(kernels))
            stack.enter_context(async_tensor_traced(config, kernels, recorder))
        yield


def _without_random_state(joint: Any, forward: Any, backward: Any, num_symbols: int) -> tuple[Any, Any]:
    """Attention that is computed again keeps a state of random numbers: host memory, and unused without dropout."""
    return forward, backward


@contextmanager
def _compiling_not_recorded(recorder: Recorder) -> Iterator[None]:
    """Compilers try operations out on fake tensors: those are no part of the step."""
    from torch._dynamo.callback import callback_handler

    before: list[bool] = []

    def starts(_: Any) -> None:
        before.append(recorder.is_paused)
        recorder.is_paused = True

    def ends(_: Any) -> None:
        recorder.is_paused = before.pop()

    callback_handler.register_start_callback(starts)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(starts)
        callback_handler.remove_end_callback(ends)


@contextmanager
def _planned_by_inductor(kernels: Kernels) -> Iterator[None]:
    import torch._inductor.compile_fx as inductor
    from torch._inductor.graph import GraphLowering

    from titan_tools.memory.trace.compile.gpu import gpu_described

    with ExitStack() as stack:
        if kernels.device == "cuda":
            stack.enter_context(gpu_described())
        stack.enter_context(inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", _module))
        stack.enter_context(patch.object(inductor, "get_input_idxs_to_check", lambda inputs, static: ()))  # all aligned
        planned = partial(_plan, inductor.compile_fx_inner, torch.device(kernels.device, 0))
        stack.enter_context(patch.object(inductor, "compile_fx", partial(inductor.compile_fx, inner_compile=planned)))
        yield


def _plan(
    compile_graph: Callable, device: torch.device, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> Any:
    """Inductor's own compilation of a forward or backward graph, as if its tensors were on `device`."""
    tensors = FakeTensorMode(allow_non_fake_inputs=True)
    context = TracingContext.try_get()
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        if context is not None:
            stack.enter_context(patch.object(context, "fake_mode", tensors))
        # A torch without CUDA refuses to copy also where there is nothing to copy; the shape stays the target's.
        stack.enter_context(patch.object(Tensor, "copy_", lambda target, source, non_blocking=False: target))
        with tensors:
            inputs = [_on(device, each) for each in inputs]
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": device}
        return compile_graph(graph, inputs, **options)


def _on(device: torch.device, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _module(graph: Any) -> SimpleNamespace:
    """In place of Inductor's: its code is not written to disk, nor are its kernels compiled."""
    from titan_tools.memory.trace.compile.code import run_without_kernels

    code, _ = graph.codegen()
    return run_without_kernels(code.value, {**graph.constants, **graph.torchbind_constants})
