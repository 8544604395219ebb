"""The bar that a person sees while a batch runs."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from titan_tools.console import tally
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.request import Request


def progress_bar(request: Request, ranks: Ranks, total: int, what: str) -> AbstractContextManager[Callable[..., None]]:
    """A bar of `total` things (see `tally`) on the first rank's terminal, unless results pass there as lines."""
    lines_pass = request.batch and not request.out and not request.as_json and sys.stdout.isatty()
    if not ranks.is_first or lines_pass:
        return nullcontext(lambda num=1: None)
    return tally(total, what)
