"""torch.compile in a trace: Inductor plans the buffers as for a GPU, and the step runs that plan without kernels.

Dynamo, AOTAutograd and its partitioner run as in training, on fake tensors. Inductor fuses, orders and reuses buffers
as for a GPU; the code that it generates to call its kernels then runs without them (inductor_code.py).
Import this module only where layers are compiled: Dynamo and Inductor take seconds to load.
"""

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
import torch._functorch.config
import torch._functorch.partitioners
import torch._inductor.compile_fx as inductor
import torch._inductor.config
from torch import Tensor
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._guards import TracingContext
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from converters.common.errors import TitanError
from titan_tools.memory.trace.async_tensor import trace_async_tp
from titan_tools.memory.trace.coverage import NotTraceable, chain
from titan_tools.memory.trace.inductor_code import FILE_NAME, describe_gpu, run_without_kernels
from titan_tools.memory.trace.kernels import Kernels
from titan_tools.memory.trace.recorder import Recorder
from trainer.config.sections import Config

_captures: ContextVar[Iterator[int] | None] = ContextVar("captures", default=None)  # numbers of the next captures
_COMPILER_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)
# Cases in which Dynamo's debug context says more than its explanation
_DETAILED_CONTEXTS = ("raised exception ", "unsupported operator: ")
_SILENCED_LOGGERS = (
    "torch._higher_order_ops.wrap",  # advice on models with activation checkpointing
    "torch._subclasses.fake_tensor",  # logs the traceback of an error that is raised as well
)


@contextmanager
def trace_compiled_code(config: Config, kernels: Kernels, recorder: Recorder) -> Iterator[None]:
    """Trace the parts that the config compiles as compiled code.

    Inductor's plan is followed as described above; the backends aot_eager and eager run as they are.
    """
    with ExitStack() as stack:
        stack.enter_context(translate_compiler_errors())
        stack.enter_context(share_compiled_code(config))
        stack.enter_context(_pause_while_compiling(recorder))
        # With dynamic shapes, a second length would be compiled for any length; here each gets code of its own. Torch
        # collects garbage after it compiles: without that, cycles keep tensors of the first step in the next one.
        stack.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(patch.object(torch._functorch.partitioners, "functionalize_rng_ops", _keep_rng_ops))
        for name in _SILENCED_LOGGERS:
            stack.enter_context(patch.object(logging.getLogger(name), "disabled", True))
        if config.compile.backend == "inductor":
            stack.enter_context(_plan_with_inductor(kernels))
            stack.enter_context(trace_async_tp(config, kernels, recorder))
        yield


@contextmanager
def share_compiled_code(config: Config) -> Iterator[None]:
    """Let the captures of one job share compiled code: each graph is compiled and planned once.

    Only for captures of one job: its ranks differ in their pipeline coordinate, which no compiled part of a model sees.
    Afterwards Dynamo is reset: code without kernels must not run in a step that computes values.
    """
    if numbers := _captures.get():
        # Each capture may compile as many variants as a run; torch counts those of all captures together.
        with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit * next(numbers)):
            yield
        return
    token = _captures.set(count(1))
    torch._dynamo.reset()
    try:
        yield
    finally:
        _captures.reset(token)
        torch._dynamo.reset()


@contextmanager
def translate_compiler_errors() -> Iterator[None]:
    """Raise NotTraceable for an error of Dynamo, AOTAutograd, Inductor or the generated code; keep errors of ours."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo\.")  # the errors say the same
            yield
    except Exception as error:
        errors = list(chain(error))
        if own := next((each for each in errors if isinstance(each, TitanError)), None):
            raise own from None
        failed: BaseException | None
        if failed := next((each for each in errors if isinstance(each, _COMPILER_ERRORS)), None):
            what = "torch.compile fails on this model"
        elif failed := next(filter(_is_from_generated_code, errors), None):
            what = "the code that this torch's Inductor generates cannot be followed"
        else:
            raise
        raise NotTraceable(
            f"no estimate is given: {what}: {_in_a_line(failed)}",
            hint="uncompiled, a model usually needs more memory, and an error of its own shows where it comes from",
            nearest={"compile.enable": "false"},
        ) from error


def _is_from_generated_code(error: BaseException) -> bool:
    """Whether a line of the generated code failed in Python: an unknown name or argument."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return isinstance(error, NameError | AttributeError | TypeError) and [each.filename for each in last] == [FILE_NAME]


def _in_a_line(error: BaseException) -> str:
    """A compiler error in one line: its first line, Dynamo's explanation, and the line of the model's code."""
    while inner := getattr(error, "inner_exception", None):
        error = inner
    first, *others = [line.strip() for line in str(error).strip().splitlines()] or [""]
    explained = [line.partition(": ")[2] for line in others if line.startswith("Explanation: ")]
    context = [line.partition(": ")[2] for line in others if line.startswith("Developer debug context: ")]
    if any(text.startswith(_DETAILED_CONTEXTS) for text in context):
        explained = context
    code = [line for line in others if line.startswith("File ")] if "from user code:" in others else []
    message = ". ".join(part.rstrip(".") for part in (first, *explained[:1]) if part)
    point = f" ({code[-1]})" if code else ""
    return f"{type(error).__name__}: {message:.500}{point}" if message else type(error).__name__


def _keep_rng_ops(joint: Any, forward: Any, backward: Any, *unused: Any, **others: Any) -> tuple[Any, Any]:
    """Skip the RNG state that recomputed attention would keep: it is in host memory, and unused without dropout."""
    return forward, backward


@contextmanager
def _pause_while_compiling(recorder: Recorder) -> Iterator[None]:
    """Do not record the fake tensors on which the compiler tries operations."""
    before: list[bool] = []

    def start(_: Any) -> None:
        before.append(recorder.is_paused)
        recorder.is_paused = True

    def end(_: Any) -> None:
        recorder.is_paused = before.pop()

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


@contextmanager
def _plan_with_inductor(kernels: Kernels) -> Iterator[None]:
    with ExitStack() as stack:
        if kernels.device == "cuda":
            stack.enter_context(describe_gpu())
        stack.enter_context(
            torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1)
        )
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", _load_without_kernels))
        stack.enter_context(patch.object(inductor, "get_input_idxs_to_check", lambda *_, **__: ()))  # all aligned
        planned = partial(_compile_for_device, inductor.compile_fx_inner, torch.device(kernels.device, 0))
        stack.enter_context(patch.object(inductor, "compile_fx", partial(inductor.compile_fx, inner_compile=planned)))
        yield


def _compile_for_device(
    compile_graph: Callable[..., Any],
    device: torch.device,
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    **options: Any,
) -> Any:
    """Compile a forward or backward graph with Inductor as if its tensors were on `device`."""
    tensors = FakeTensorMode(allow_non_fake_inputs=True)
    context = TracingContext.try_get()
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        if context is not None:
            stack.enter_context(patch.object(context, "fake_mode", tensors))
        # A torch without CUDA refuses copies to it, also of nothing; the shape stays the target's.
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


def _load_without_kernels(graph: Any, *unused: Any, **others: Any) -> SimpleNamespace:
    """In place of GraphLowering.compile_to_module: the code is not written to disk, and its kernels not compiled."""
    code, _ = graph.codegen()
    return run_without_kernels(code.value, {**graph.constants, **graph.torchbind_constants})
