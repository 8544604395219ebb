"""Forward passes of a loaded model over sequences of different lengths, each a row of one preallocated cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_tools.infer.decoding.attention import attention_kernels
from titan_tools.infer.decoding.cache import CacheStep, KVCache, attach_cache
from titan_tools.infer.decoding.products import can_attend_by_products
from titan_tools.infer.decoding.sampling import likeliest
from titan_tools.infer.decoding.static_decode import StaticDecoder, can_split
from titan_tools.infer.decoding.steps import Decode, Prefill, Span, StaticDecode
from titan_tools.infer.model.compiling import compile_all_shapes, compiled_body
from titan_tools.infer.model.load import SlicedModel

# Fewest common tokens for which copying them between rows, or computing them in a pass of their own, pays: a GPU takes
# as long for a pass of few tokens as for hundreds
LEAST_SHARED = {"cpu": 32, "cuda": 256}


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning. `a` and `b` have the same type; slices are compared in C, by bisection."""
    same, most = 0, min(len(a), len(b))
    while same < most:
        middle = (same + most + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same


def is_worth_keeping(num: int, num_tokens: int) -> bool:
    """Whether to keep the first `num` of `num_tokens` in a row rather than to compute all again.

    After earlier tokens attention needs a mask, which costs a CPU as much as 40 of 512 tokens.
    """
    return 8 * num >= num_tokens


# Tokens of one pass; longer prompts take several, so that activations stay bounded. A CPU is as fast with 512, and its
# activations take a quarter of the memory
PREFILL_TOKENS = {"cuda": 2048, "cpu": 512}
_MASK_ELEMENTS = 1 << 26  # queries × keys of one pass after earlier tokens
_ROOM_STEP = 64  # a row's room is a multiple of it: a GPU's kernels copy masks with unaligned rows


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Tokens to put into a row, which holds the first `keep` already.

    `mark`: behind how many of them other tokens are expected later, for layers with windows (KVCache). 0: where they
    part with the tokens of a row.
    """

    row: int
    tokens: Sequence[int]
    keep: int = 0
    mark: int = 0

    def __post_init__(self) -> None:
        assert self.keep < len(self.tokens), "the last token must be computed, for its logits"

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.keep


class Engine:
    """`rows` sequences of up to `room` tokens. With tp > 1 every rank makes the same calls and gets the same logits.

    `held` are the tokens of each row whose keys are in the cache. A model works with its newest engine only.
    """

    def __init__(
        self,
        model: SlicedModel,
        *,
        rows: int,
        room: int,
        static: bool | None = None,
        compile: bool = False,
        backend: str = "inductor",
    ):
        """`static`: decode in a few fixed shapes; None: on a GPU, where each is recorded as a CUDA graph.

        `compile`: decode, then always in fixed shapes, through torch.compile with `backend`. Prefill is not compiled:
        every prompt has another length.
        """
        self.model, self.rows, self.room = model, rows, room
        self.held: list[list[int]] = [[] for _ in range(rows)]
        room = cached_tokens(room)
        self._cache = attach_cache(
            model.body,
            rows=rows,
            room=room,
            reaches=model.reaches(room),
            num_kv_heads=model.num_kv_heads,
            dtype=model.dtype,
            device=model.device,
        )
        on_gpu = model.device.type == "cuda"
        self._static = None
        if compile or (on_gpu if static is None else static):
            self._static = StaticDecoder(
                _step_of(model, self._cache, backend=backend if compile else None),
                self._cache,
                model.device,
                model.dtype,
                records=on_gpu,
                splits=can_split(model.device, model.dtype, model.head_dim, sinks=model.has_sinks),
                by_products=model.latent is not None and can_attend_by_products(model.device, model.dtype),
            )
        if on_gpu and model.quantized:  # compile the product of one row now, not during the first token
            self.prefill(0, [0])
            self._cut(0, 0)

    @torch.inference_mode()
    def prefill(self, row: int, tokens: Sequence[int], *, keep: int = 0) -> Tensor:
        """Put `tokens` into a row, which holds the first `keep` already; fp32 logits [V] of the last one."""
        for hidden_LD in self.hidden(row, tokens, keep=keep):
            last_D = hidden_LD[-1]
        logits_V: Tensor = self.model.head(last_D[None])[0]
        return logits_V.float()

    @torch.inference_mode()
    def prefill_rows(self, prompts: Sequence[RowTokens]) -> Tensor:
        """Like `prefill`, for several rows in one pass, which they must fit; fp32 logits [B, V]."""
        if len(prompts) == 1:
            return self.prefill(prompts[0].row, prompts[0].tokens, keep=prompts[0].keep)[None]
        hidden_LD = self.hidden_of_all(prompts)
        last_B = torch.tensor([one.num_new for one in prompts]).cumsum(0) - 1
        logits_BV: Tensor = self.model.head(hidden_LD[last_B.to(hidden_LD.device)])
        return logits_BV.float()

    def fit_one_pass(self, prompts: Sequence[RowTokens]) -> bool:
        """Whether all new tokens fit one forward pass."""
        num_new = sum(one.num_new for one in prompts)
        num_scores = sum(one.num_new * len(one.tokens) for one in prompts if one.keep)
        return num_new <= PREFILL_TOKENS[self.model.device.type] and num_scores <= _MASK_ELEMENTS

    def hidden(self, row: int, tokens: Sequence[int], *, keep: int = 0, mark: int = 0) -> Iterator[Tensor]:
        """Like `prefill`, but yields the final hidden states of the tokens from `keep` on, in pieces [L, D]."""
        whole, most = RowTokens(row, tokens, keep, mark), PREFILL_TOKENS[self.model.device.type]
        start, marks = whole.keep, self._marks(whole)
        while start < len(tokens):
            end = start + _piece_tokens(start, most=most)
            hidden_LD = self._pass([RowTokens(row, tokens[:end], start)], [marks])
            start += len(hidden_LD)
            yield hidden_LD

    def hidden_of_all(self, prompts: Sequence[RowTokens]) -> Tensor:
        """Final hidden states [L, D] of all new tokens of the prompts, in one pass.

        Prompts of the same row must keep equally many tokens; the row then holds the last of them.
        """
        assert self.fit_one_pass(prompts)
        return self._pass(prompts, [self._marks(one) for one in prompts])

    @torch.inference_mode()
    def _pass(self, prompts: Sequence[RowTokens], marks: Sequence[Sequence[int]]) -> Tensor:
        if self._static:
            self._static.forget_ahead()
        # Before the pass: an interruption must not leave `held` with tokens whose keys are overwritten. All rows are
        # cut before any is written, and a row has the marks of its last tokens only.
        for row, keep in dict.fromkeys((one.row, one.keep) for one in prompts):
            self._cut(row, keep)
        spans, last = [], {one.row: place for place, one in enumerate(prompts)}
        for place, (one, wanted) in enumerate(zip(prompts, marks, strict=True)):
            num, is_last = len(one.tokens), last[one.row] == place
            self._cache.will_write(one.row, num)
            spans.append(Span(one.row, one.keep, num, tuple(at for at in wanted if is_last and one.keep < at <= num)))
        new_1L = torch.tensor([[token for one in prompts for token in one.tokens[one.keep :]]])
        step = Prefill(spans, device=self.model.device, dtype=self.model.dtype)
        hidden_LD = _forward(self.model.body, self._cache, step, new_1L.to(self.model.device))[0]
        for one, span in zip(prompts, spans, strict=True):
            self.held[one.row][one.keep :] = one.tokens[one.keep :]
            self._cache.has_written(one.row, span.end, step.marks_of(span))
        return hidden_LD

    def _marks(self, one: RowTokens) -> list[int]:
        """Behind which of its tokens the row will be marked: the last one, and `RowTokens.mark`."""
        if not self._cache.has_windows:
            return []
        mark = one.mark or max(num_common(one.tokens, held) for held in self.held)
        return sorted({mark, len(one.tokens)})

    def _cut(self, row: int, num: int) -> None:
        assert num <= len(self.held[row])
        del self.held[row][num:]
        self._cache.cut(row, num)

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each of the first rows; fp32 logits [B, V]. The other rows may be overwritten."""
        num = len(tokens)
        if self._static:
            self.prepare_decode(num)
            logits_BV = self._static(tokens, self.lengths(num))
        else:
            self._will_decode(num)
            step = Decode(
                self.lengths(num), reaches=self._cache.reaches, device=self.model.device, dtype=self.model.dtype
            )
            tokens_B1 = torch.tensor(tokens, device=self.model.device)[:, None]
            logits_BV = self.model.head(_forward(self.model.body, self._cache, step, tokens_B1)[:, -1]).float()
        self._hold(tokens)
        return logits_BV

    @torch.inference_mode()
    def decode_likeliest(self, tokens: Sequence[int], *, ahead: bool) -> list[list[int]]:
        """Like `decode`, but what `likeliest` says of the logits. `ahead`: these tokens will be decoded next.

        That the next call differs is no error: what was computed ahead for it is lost.
        """
        if not self._static:
            found: list[list[int]] = likeliest(self.decode(tokens)).tolist()
            return found
        self.prepare_decode(len(tokens))
        found = self._static.likeliest(tokens, self.lengths(len(tokens)), ahead=ahead)
        self._hold(tokens)
        return found

    def _will_decode(self, num: int) -> None:
        for row, length in enumerate(self.lengths(num)):
            # A static step may be launched ahead
            self._cache.will_write(row, length + (2 if self._static else 1))

    def _hold(self, tokens: Sequence[int]) -> None:
        for held, token in zip(self.held, tokens, strict=False):
            held.append(token)

    @torch.inference_mode()
    def prepare_decode(self, num: int) -> None:
        """Compile and record the step of the next `decode` of `num` rows, on first use."""
        if self._static:
            for row in range(num, self.rows):
                self._cut(row, 0)
            self._will_decode(num)
            self._static.prepare(self.lengths(num))

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, *, length: int | None = None) -> None:
        """Set a row to the first `length` tokens (default: all) of another row, or of itself; see `num_usable`."""
        tokens = self.held[source][:length]
        if source != target:
            if self._static:
                self._static.forget_ahead()
            self.held[target] = []
            self._cache.copy_row(source, target, len(tokens))
        else:
            self._cut(source, len(tokens))
        self.held[target] = tokens

    def take_beginning(self, row: int, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt its row holds, after copying them from another row where that pays."""
        num_by_row = self.num_held(tokens)
        source = max(range(self.rows), key=lambda other: (num_by_row[other], other == row))
        if num_by_row[source] >= LEAST_SHARED[self.model.device.type]:
            self.copy_row(source, row, length=num_by_row[source])
            return num_by_row[source]
        return num_by_row[row] if is_worth_keeping(num_by_row[row], len(tokens)) else 0

    def num_held(self, tokens: Sequence[int]) -> list[int]:
        """How many leading tokens of a prompt each row holds; less than all, since the last one must be computed."""
        return [self.num_usable(row, tokens, most=len(tokens) - 1) for row in range(self.rows)]

    def num_usable(self, row: int, tokens: Sequence[int], *, most: int | None = None) -> int:
        """How many leading tokens, at most `most`, of a text a row holds and can be continued behind."""
        num = num_common(tokens, self.held[row])
        return self._cache.usable(row, num if most is None else min(num, most))

    def lengths(self, num: int | None = None) -> list[int]:
        """How many tokens the first `num` rows (default: all) hold."""
        return [len(tokens) for tokens in self.held[:num]]


def _step_of(model: SlicedModel, cache: KVCache, *, backend: str | None) -> Callable[[StaticDecode], Tensor]:
    """The function that computes a static step's logits [B, V]. `backend`: of torch.compile, None: not compiled.

    It does not refer to the engine: a reference cycle would keep CUDA graphs until garbage collection, and NCCL's
    teardown waits until graphs with its collectives are freed.
    """
    body: nn.Module = model.body
    head: nn.Module = model.head
    if backend is not None:
        body, head = compiled_body(body, backend=backend), compile_all_shapes(head, backend=backend)

    def logits_of(step: StaticDecode) -> Tensor:
        if backend is not None:  # the same code for all lengths
            for keys in step.ranges.values():
                torch._dynamo.maybe_mark_dynamic(*keys.as_long)
        logits_BV: Tensor = head(_forward(body, cache, step, step.tokens)[:, -1])
        return logits_BV.float()

    return logits_of


def _forward(body: nn.Module, cache: KVCache, step: CacheStep, tokens_BL: Tensor) -> Tensor:
    cache.step = step
    with attention_kernels(tokens_BL.device):
        hidden_BLD: Tensor = body(tokens_BL, step.positions)
    return hidden_BLD


def cached_tokens(room: int) -> int:
    """The tokens of a row that an engine for `room` tokens allocates, where a layer attends to all of them."""
    return -(-room // _ROOM_STEP) * _ROOM_STEP


def _piece_tokens(start: int, *, most: int) -> int:
    """How many tokens fit one pass after `start` others."""
    return min(most, max(_MASK_ELEMENTS // (start + most), 1))
