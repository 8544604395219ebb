"""Bytes that an optimizer's step makes for a while, beside parameters, gradients and moments."""

from collections.abc import Iterable, Iterator, Sequence

from titan_tools.memory.formula.run_shape import FP32, RunShape

COPIED_ELEMENTS = 1 << 26  # trainer/moments.py: what it makes fp32 copies of at once


def step_bytes(run: RunShape, sizes_by_group: Sequence[Sequence[int]]) -> int:
    """The most at once, for parameters of so many elements here: torch's kernel, and the copies that it works on.

    Copies only where moments have another dtype than parameters (trainer/moments.py): of what is not fp32 already.
    """
    sizes = [size for group in sizes_by_group for size in group]
    if not sizes or run.is_offloaded:
        return 0
    if run.state_bytes == 2 * run.param_bytes:
        return _kernel_elements(run, sizes) * run.param_bytes
    num_copies = 2 * (run.param_bytes != FP32) + 2 * (run.moment_bytes != FP32)  # of parameter and gradient, of moments
    batches = (batch for group in sizes_by_group for batch in _batches(group))
    return FP32 * max(num_copies * sum(batch) + _kernel_elements(run, batch) for batch in batches)


def _kernel_elements(run: RunShape, sizes: Iterable[int]) -> int:
    """Of torch's Adam: the root of the second moment, foreach of all at once; one by one also what it is divided to."""
    return {"fused": 0, "foreach": sum(sizes), "for-loop": 2 * max(sizes)}[run.optimizer]


def _batches(sizes: Iterable[int]) -> Iterator[list[int]]:
    """As trainer/moments.py makes them of a group: runs that come to no more than COPIED_ELEMENTS, or one alone."""
    batch: list[int] = []
    for size in sizes:
        if batch and sum(batch) + size > COPIED_ELEMENTS:
            yield batch
            batch = []
        batch.append(size)
    if batch:
        yield batch
