"""Decode steps of a few fixed shapes, each recorded as a CUDA graph on its first use: a step is one launch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from titan_tools.infer.decoding.cache import KVCache, StaticDecode

SHORTEST = 256  # keys that a step looks at, at least; then powers of two
_WARM_UP_RUNS = 2  # as torch's docs ask before a capture; the first one also compiles


class StaticDecoder:
    """Runs `forward`, which makes a step's logits [B, V]; `records`: as CUDA graphs.

    Rows and keys are padded to the next power of two, so that there are few shapes to record.
    """

    def __init__(
        self,
        forward: Callable[[StaticDecode], Tensor],
        cache: KVCache,
        device: torch.device,
        dtype: torch.dtype,
        *,
        records: bool,
    ):
        self._forward, self._cache, self._device, self._dtype = forward, cache, device, dtype
        self._steps: dict[tuple[int, int], tuple[StaticDecode, Callable[[], Tensor]]] = {}
        self._records = records
        self._memory = torch.cuda.graph_pool_handle() if records else None  # one for all: they never run at once

    def __call__(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Logits [B, V] of one more token for each of the first rows, which hold `lengths` tokens."""
        step, run = self.prepare(lengths)
        step.fill(tokens, lengths)
        return run()[: len(tokens)].clone()  # the next step writes to the same memory

    def prepare(self, lengths: Sequence[int]) -> tuple[StaticDecode, Callable[[], Tensor]]:
        """The step for rows of these lengths and what runs it; made when it is needed for the first time."""
        num = power_of_two(len(lengths), self._cache.rows)
        length = power_of_two(max(*lengths, SHORTEST - 1) + 1, self._cache.room)
        if (num, length) not in self._steps:
            step = StaticDecode(num=num, length=length, device=self._device, dtype=self._dtype)
            step.fill([0] * len(lengths), lengths)  # trial runs write only keys that the step itself will write again
            self._steps[num, length] = step, self._made(step)
        return self._steps[num, length]

    def _made(self, step: StaticDecode) -> Callable[[], Tensor]:
        def run() -> Tensor:
            step.begin()
            return self._forward(step)

        if not self._records:
            run()  # compiles, where that is asked for
            return run
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog is a thread that may ask CUDA things in the meantime
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits_BV = run()

        def replay() -> Tensor:
            graph.replay()
            return logits_BV

        return replay


def power_of_two(number: int, most: int) -> int:
    """The next power of two, `most` at most."""
    return min(1 << (number - 1).bit_length(), most)
