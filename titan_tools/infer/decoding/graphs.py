"""Decode steps of a few fixed shapes. On a GPU each is recorded as a CUDA graph on its first use: one launch a step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from titan_tools.infer.decoding.cache import KVCache, MaskedKeys, StaticDecode
from titan_tools.infer.decoding.split_keys import SplitKeys

SHORTEST = 256  # keys that a step looks at, at least; then powers of two
_WARM_UP_RUNS = 2  # as torch's docs ask before a capture; the first one also compiles


class StaticDecoder:
    """Runs `forward`, which makes a step's logits [B, V]; `records`: as CUDA graphs, `splits`: with SplitKeys.

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
        splits: bool,
    ):
        self._forward, self._cache, self._device, self._dtype = forward, cache, device, dtype
        self._steps: dict[tuple[int, int], tuple[StaticDecode, Callable[[], Tensor]]] = {}
        self._records, self._splits = records, splits
        # One for all: each stream that multiplies matrices has a workspace of its own, 32 MiB on an H100
        self._stream = torch.cuda.Stream(device) if records else None
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
            step = StaticDecode(num=num, key_range=self._key_range(num, length), device=self._device)
            step.fill([0] * len(lengths), lengths)  # trial runs write only keys that the step itself will write again
            self._steps[num, length] = step, self._made(step)
        return self._steps[num, length]

    def _key_range(self, num: int, length: int) -> MaskedKeys | SplitKeys:
        if self._splits:
            return SplitKeys(num=num, length=length, room=self._cache.room, device=self._device)
        return MaskedKeys(num=num, length=length, device=self._device, dtype=self._dtype)

    def _made(self, step: StaticDecode) -> Callable[[], Tensor]:
        def run() -> Tensor:
            step.begin()
            return self._forward(step)

        if not self._records:
            run()  # compiles, where that is asked for
            return run
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog is a thread that may ask CUDA things in the meantime
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            logits_BV = run()

        def replay() -> Tensor:
            graph.replay()
            return logits_BV

        return replay


def power_of_two(number: int, most: int) -> int:
    """The next power of two, `most` at most."""
    return min(1 << (number - 1).bit_length(), most)
