"""Decode steps of a few fixed shapes, recorded as CUDA graphs on a GPU, with split-KV attention (flash decoding).

`scaled_dot_product_attention` gives all keys of a KV head of a masked step to one thread block: with one row and 8 KV
heads, 8 of a GPU's 132 processors would read the cache. Flash attention for packed sequences splits the keys, and takes
their number from a tensor, as a CUDA graph needs it; no mask is needed then.

The public function of torch 2.13, torch.nn.attention.varlen.varlen_attn, calls the same operator, but fills a tensor in
every layer, one more kernel launch; that of 2.11 has no argument for the number of keys.

Shape letters as in cache.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tools.infer.decoding.attention import NOT_HERE, attend_one, may_flash, random_case, with_share
from titan_tools.infer.decoding.cache import PLAIN, KVCache, LayerCache, Softmax
from titan_tools.infer.decoding.steps import KeyRange, MaskedKeys, StaticDecode
from titan_tools.infer.model.reach import Reach


class SplitKeys:
    """Keys of `num` rows of the cache, each with room for `room` tokens, of which at most `length` are used."""

    def __init__(self, *, num: int, length: int, room: int, device: torch.device):
        self.num, self.length = num, length
        self.empty_T0 = torch.empty(length, 0, device=device)
        self.first_query = torch.arange(num + 1, dtype=torch.int32, device=device)
        self.first_key = self.first_query * room
        self.num_keys_B: Tensor | None = None

    def begin(self, last_B1: Tensor) -> None:
        self.num_keys_B = last_B1[:, 0].int() + 1

    @property
    def as_long(self) -> tuple[Tensor, int]:
        return self.empty_T0, 0

    def attend(self, q_B1NH: Tensor, layer: LayerCache, softmax: Softmax = PLAIN) -> Tensor:
        """The cache must be stored token by token, as `attach_cache` makes it on a GPU.

        The kernel splits keys only where several query heads share them; otherwise each query head is passed twice.
        """
        q_BNH, is_alone = q_B1NH[:, 0], q_B1NH.shape[2] == layer.keys_RKTH.shape[1]
        if is_alone:
            q_BNH = q_BNH.repeat_interleave(2, dim=1)
        cached = layer.keys_RKTH, layer.values_RKTH
        keys, values = (one_RKTH[: self.num].transpose(1, 2).flatten(0, 1) for one_RKTH in cached)
        found = torch.ops.aten._flash_attention_forward(
            q_BNH, keys, values, self.first_query, self.first_key, 1, self.empty_T0.shape[0], 0.0, False, False,
            scale=softmax.scale, seqused_k=self.num_keys_B,
        )  # fmt: skip
        out_BNH: Tensor = found[0]
        if (sinks_N := softmax.sinks_N) is not None:
            sinks_N = sinks_N.repeat_interleave(2) if is_alone else sinks_N
            out_BNH = with_share(out_BNH, sums_by_row(found[1]), sinks_N)
        return out_BNH[:, None, ::2] if is_alone else out_BNH[:, None]


def sums_by_row(lse: Tensor) -> Tensor:
    """[B, N] of the sums that the kernel returns for one query in each row. Their shape varies with torch's version.

    [B, N, 1]; or [N, B], as its function for packed sequences returns them: the kernel takes the heads of a KV head as
    queries, and then writes (KV head, query, row).
    """
    return lse.squeeze(-1) if lse.dim() == 3 else lse.T


@cache
def can_split(device: torch.device, dtype: torch.dtype, head_dim: int, *, sinks: bool = False) -> bool:
    """Whether `SplitKeys` works here: tried on a few keys, because its operator is private to torch (2.11 to 2.13)."""
    if not may_flash(device, dtype, head_dim):
        return False
    try:
        return all(
            _is_right(device, dtype, head_dim, num_heads=num_heads, length=length, sinks=sinks)
            for num_heads in (2, 8)
            for length in ((128, 512) if sinks else (512,))
        )
    except NOT_HERE:
        return False


def _is_right(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, num_heads: int, length: int = 512, sinks: bool = False
) -> bool:
    """Compare two rows of two KV heads, one with 3 keys and one with nearly `length`.

    512 are split; 128, a window of GPT-OSS, are not, and the kernel may return their sums in another shape.
    """
    shapes = (2, 1, num_heads, head_dim), (2, 640, 2, head_dim), (2, 640, 2, head_dim), (num_heads,)
    q_B1NH, keys_RTKH, values_RTKH, sinks_N = random_case(device, dtype, shapes)
    sinks_N = 2 * sinks_N + 4  # about as large as the logarithms of the sums
    keys, values = keys_RTKH.transpose(1, 2), values_RTKH.transpose(1, 2)
    positions_B1 = torch.tensor([[2], [length - 12]], device=device)
    key_range = SplitKeys(num=2, length=length, room=640, device=device)
    key_range.begin(positions_B1)
    layer = LayerCache(keys, values, Reach(640))
    if sinks:
        masked = MaskedKeys(num=2, length=640, device=device, dtype=torch.float32)
        masked.begin(positions_B1)
        exact = attend_one(
            q_B1NH.float(), keys.float(), values.float(), bias_B11T=masked.bias_B11T, scale=None, sinks_N=sinks_N
        )
        found = key_range.attend(q_B1NH, layer, Softmax(None, sinks_N)).float()
        return bool((found - exact).abs().max() < 0.03)
    found = key_range.attend(q_B1NH, layer).float()
    mask_B11T = (torch.arange(640, device=device) <= positions_B1)[:, None, None]
    exact = F.scaled_dot_product_attention(
        q_B1NH.float().transpose(1, 2), keys.float(), values.float(), attn_mask=mask_B11T, enable_gqa=True
    )
    return bool((found - exact.transpose(1, 2)).abs().max() < 0.03)  # values are around 1, and have 8 bits


SHORTEST = 256  # keys of the shortest step; longer ones have powers of two
_WARM_UP_RUNS = 2  # before a capture, as in torch's documentation; the first one also compiles


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that runs, or has run. `is_read`: when its result is in `found_2B`, on the host; None: it is there."""

    step: StaticDecode
    found_2B: Tensor
    is_read: Any = None  # a CUDA event

    def read(self) -> list[list[int]]:
        if self.is_read is not None:
            self.is_read.synchronize()
        found: list[list[int]] = self.found_2B.tolist()
        return found


def _start_reading(found_2B: Tensor) -> tuple[Tensor, Any]:
    """Copy a GPU's result to the host, before the next run overwrites it; the copy, and the event that it is there."""
    on_host_2B = torch.empty(found_2B.shape, dtype=found_2B.dtype, pin_memory=True)
    on_host_2B.copy_(found_2B, non_blocking=True)
    is_read = torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_read.record()
    return on_host_2B, is_read


class StaticDecoder:
    """Runs `forward`, which returns a step's logits [B, V]; `records`: as CUDA graphs, `splits`: with SplitKeys,
    `by_products`: with MaskedKeys that are multiplied.

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
        by_products: bool = False,
    ):
        self._forward, self._cache, self._device, self._dtype = forward, cache, device, dtype
        self._steps: dict[tuple[int, int], tuple[StaticDecode, Callable[[], Tensor]]] = {}
        self._records, self._splits, self._by_products = records, splits, by_products
        self._ahead: tuple[_Launched, Sequence[int], Sequence[int]] | None = (
            None  # with the tokens and lengths it is for
        )
        # One stream for all graphs: each that multiplies matrices has a workspace of its own, 32 MiB on an H100
        self._stream: Any = torch.cuda.Stream(device) if records else None  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle() if records else None  # graphs never run concurrently

    def __call__(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Logits [B, V] of one more token for each of the first rows, which hold `lengths` tokens."""
        self.forget_ahead()
        step, run = self.prepare(lengths)
        step.fill(tokens, lengths)
        return run()[: len(tokens)].clone()  # the next step writes to the same memory

    def likeliest(self, tokens: Sequence[int], lengths: Sequence[int], *, ahead: bool) -> list[list[int]]:
        """What `likeliest` says of these logits. `ahead`: the likeliest tokens will be the next ones.

        On a GPU, the step after this one is then launched before this one's result is read.
        """
        launched, self._ahead = self._ahead, None
        if launched and (tokens, lengths) == launched[1:]:
            now = launched[0]
        else:
            step, run = self.prepare(lengths)
            step.fill(tokens, lengths)
            now = self._launch(step, run)
        following = [length + 1 for length in lengths]
        after = None
        if ahead and self._records and max(following) < now.step.length:
            after = self._launch(*self.prepare(following))
        found = [row[: len(tokens)] for row in now.read()]
        if after is not None:
            self._ahead = after, found[1], following
        return found

    def forget_ahead(self) -> None:
        """Rows have changed: a step that was launched ahead is not used. What it wrote follows the rows' ends."""
        self._ahead = None

    def _launch(self, step: StaticDecode, run: Callable[[], Tensor]) -> _Launched:
        run()
        return _Launched(step, *_start_reading(step.found_2B)) if self._records else _Launched(step, step.found_2B)

    def prepare(self, lengths: Sequence[int]) -> tuple[StaticDecode, Callable[[], Tensor]]:
        """The step for rows of these lengths and the function that runs it; made on first use."""
        num = power_of_two(len(lengths), self._cache.rows)
        length = power_of_two(max(*lengths, SHORTEST - 1) + 1, self._cache.room)
        if (num, length) not in self._steps:
            step = StaticDecode(
                num=num,
                length=length,
                reaches=self._cache.reaches,
                make_range=lambda reach, used: self._key_range(num, used, reach),
                device=self._device,
            )
            self._steps[num, length] = step, self._record(step, lengths)
        return self._steps[num, length]

    def _key_range(self, num: int, length: int, reach: Reach) -> KeyRange:
        if self._splits:
            return SplitKeys(num=num, length=length, room=reach.size, device=self._device)
        return MaskedKeys(num=num, length=length, device=self._device, dtype=self._dtype, by_products=self._by_products)

    def _record(self, step: StaticDecode, lengths: Sequence[int]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            step.begin()
            logits_BV = self._forward(step)
            step.advance(logits_BV)
            return logits_BV

        def warm_up() -> None:
            step.fill([0] * len(lengths), lengths)  # writes only keys that the step will write again
            run()

        if not self._records:
            warm_up()  # compiles, with --compile
            return run
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                warm_up()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread may call CUDA at the same time
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            logits_BV = run()

        def replay() -> Tensor:
            graph.replay()
            return logits_BV

        return replay


def power_of_two(number: int, most: int) -> int:
    """The next power of two, but at most `most`."""
    return min(1 << (number - 1).bit_length(), most)
