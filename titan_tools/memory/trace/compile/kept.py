"""Compiled code that the captures of one job share: each graph is compiled and planned once."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count

from trainer.config.sections import Config

_captures: ContextVar[Iterator[int] | None] = ContextVar("captures", default=None)  # numbers for those to come


@contextmanager
def compiled_code_kept(config: Config) -> Iterator[None]:
    """Within, captures of this config run what an earlier one has compiled, where torch's guards find all the same.

    Only for captures of one job: its ranks differ in their pipeline coordinate, which no compiled part of a model sees.
    Afterwards torch has forgotten everything: code without kernels must not get into a step that is to compute.
    A capture by itself enters this too, and keeps nothing.
    """
    if not config.compile.enable or not config.compile.components:
        yield
        return
    import torch._dynamo

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
