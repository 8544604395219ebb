"""Context parallelism: each rank holds part of every sequence and attends to all of it.

As in the Llama 3 report, §3.3.2, keys and values are all-gathered over the context-parallel ranks, then attention is
masked. Sequences are split into 2·cp chunks and rank r holds chunks r and 2·cp-1-r ("head-tail"), so that all ranks
compute the same number of (query, key) pairs although attention is causal. Works with gloo and NCCL.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from converters.families.blocks import GroupedQuery
from trainer.models.attention import PLAIN, first_features, kind_of, to_one_width
from trainer.models.latent_attention import LatentAttention
from trainer.models.units import ModelPart, blocks_of
from trainer.parallel.shards import gather_shards

_CUDNN_WITHOUT_NAN = 92600  # 9.26: see cudnn_may_give_nan


class MaskedAttention(Protocol):
    """An inner attention module that takes a mask."""

    def make_mask(self, documents_BE: Tensor, *, num_queries: int) -> Any:
        """The mask for queries that are the last `num_queries` of the E tokens. One row is for all samples."""
        ...

    def __call__(
        self,
        q_BCNH: Tensor,
        k_BEKH: Tensor,
        v_BEKH: Tensor,
        mask: Any,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor: ...


def head_tail_positions(seq_len: int, cp_rank: int, cp: int, device: torch.device | str = "cpu") -> Tensor:
    """Positions of the tokens that a context-parallel rank holds, in local order: int64 [seq_len / cp]."""
    chunks = torch.arange(seq_len, device=device).chunk(2 * cp)
    return torch.cat((chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]))


def gather_sequence(x_BL: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' head-tail shards of [B, L, …] in sequence order: [B, cp·L, …]; differentiable."""
    shards = gather_shards(x_BL, group).chunk(dist.get_world_size(group))
    heads, tails = zip(*(shard.chunk(2, dim=1) for shard in shards), strict=True)
    return torch.cat((*heads, *reversed(tails)), dim=1)


class GatheredKeyContext(nn.Module):
    """The latents and rotated keys of the whole sequence: far fewer numbers than the keys and values made of them."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.group = group

    def forward(self, latent_BLR: Tensor, k_BL1P: Tensor) -> tuple[Tensor, Tensor]:
        both = gather_sequence(torch.cat((latent_BLR, k_BL1P.squeeze(2)), dim=-1), self.group)  # in one message
        latent_BSR, k_BSP = torch.split(both, [latent_BLR.shape[-1], k_BL1P.shape[-1]], dim=-1)
        return latent_BSR, k_BSP.unsqueeze(2)


class ContextParallelAttention(nn.Module):
    """Inner attention over sequence shards: q stays local, k and v are gathered unless they are whole already.

    Head and tail are computed separately. Each has consecutive queries and needs the keys up to its own end, so nothing
    outside the causal triangle's bounding box is computed; of a window or chunk, no key that none of them may see.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        gathers: bool = True,
        uses_cudnn: bool = False,
        masked: MaskedAttention | None = None,
        kind: GroupedQuery = PLAIN,
    ):
        super().__init__()
        self.group, self.gathers, self.uses_cudnn, self.masked = group, gathers, uses_cudnn, masked
        # Asked here, because a compiler cannot trace it
        version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        self.avoids_nan = (version or 0) < _CUDNN_WITHOUT_NAN
        self.rank, self.cp = dist.get_rank(group), dist.get_world_size(group)
        self.num_seen = min((n for n in (kind.window, kind.chunk) if n is not None), default=None)

    def make_masks(self, documents_BS: Tensor) -> tuple[Any, ...]:
        """The masks of head and tail, for the keys that each sees."""
        masked, half_len = self.masked, documents_BS.shape[1] // (2 * self.cp)
        assert masked is not None
        return tuple(
            masked.make_mask(documents_BS[:, keys], num_queries=half_len) for keys in self._keys_of_halves(half_len)
        )

    def _keys_of_halves(self, half_len: int) -> tuple[slice, slice]:
        """The places of the keys that the first query of head and of tail, or a later one, may see."""

        def keys(half: int) -> slice:
            first = half * half_len
            return slice(max(0, first - self.num_seen + 1) if self.num_seen else 0, first + half_len)

        return keys(self.rank), keys(2 * self.cp - 1 - self.rank)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        scale: float | None = None,
        *,
        mask: tuple[Any, ...] | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        if self.gathers:
            kv_BSKH = gather_sequence(torch.cat((k_BSKH, v_BSKH), dim=-1), self.group)  # in one message
            k_BSKH, v_BSKH = torch.split(kv_BSKH, [k_BSKH.shape[-1], v_BSKH.shape[-1]], dim=-1)
        outputs = []
        # Cut once: each cut would have a whole gradient in backward
        halves = zip(q_BLNH.chunk(2, dim=1), self._keys_of_halves(q_BLNH.shape[1] // 2), strict=True)
        for half, (q_BCNH, keys) in enumerate(halves):
            k_BEKH, v_BEKH = k_BSKH[:, keys], v_BSKH[:, keys]
            if self.masked is None:
                is_faulty = self.avoids_nan and cudnn_may_give_nan(k_BEKH.shape[1] - q_BCNH.shape[1])
                attend = attend_with_cudnn if self.uses_cudnn and not is_faulty else attend_to_prefix
                outputs.append(attend(q_BCNH, k_BEKH, v_BEKH, scale))
            else:
                assert mask is not None
                outputs.append(self.masked(q_BCNH, k_BEKH, v_BEKH, mask[half], scale, sinks_N))
        return torch.cat(outputs, dim=1)


def attend_to_prefix(q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of C queries that are the last C of the E tokens whose keys are given."""
    num_queries, num_keys = q_BCNH.shape[1], k_BEKH.shape[1]
    # flash attention takes one width
    q_BNCH, k_BKEH, v_BKEH = (x.transpose(1, 2) for x in to_one_width(q_BCNH, k_BEKH, v_BEKH))
    is_compiling = torch.compiler.is_compiling()
    if q_BCNH.is_cuda and is_compiling and _flash_takes(q_BNCH):
        # The operation that causal_lower_right below selects, which a compiler cannot trace; here is_causal means lower
        # right.
        out_BNCH: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            q_BNCH, k_BKEH, v_BKEH, is_causal=True, scale=scale
        )[0]
        return first_features(out_BNCH, v_BEKH.shape[-1]).transpose(1, 2)
    if q_BCNH.is_cuda and not is_compiling:
        from torch.nn.attention.bias import causal_lower_right  # here: it imports the compiler

        mask_CE: Tensor = causal_lower_right(num_queries, num_keys)  # flash attention needs no C × E mask
    else:
        mask_CE = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BCNH.device)
        mask_CE = mask_CE.tril(num_keys - num_queries)
    grouped = q_BCNH.shape[2] != k_BEKH.shape[2]
    out_BNCH = F.scaled_dot_product_attention(
        q_BNCH, k_BKEH, v_BKEH, attn_mask=mask_CE, scale=scale, enable_gqa=grouped
    )
    return first_features(out_BNCH, v_BEKH.shape[-1]).transpose(1, 2)


def _flash_takes(q_BNCH: Tensor) -> bool:
    return q_BNCH.dtype in (torch.bfloat16, torch.float16) and q_BNCH.shape[-1] % 8 == 0


def attend_with_cudnn(q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor, scale: float | None = None) -> Tensor:
    """`attend_to_prefix` by cuDNN's kernel."""
    q_BNCH, k_BKEH, v_BKEH = q_BCNH.transpose(1, 2), k_BEKH.transpose(1, 2), v_BEKH.transpose(1, 2)
    out_BNCH: Tensor = _CudnnAttention.apply(q_BNCH, k_BKEH, v_BKEH, scale)  # type: ignore[no-untyped-call]
    return out_BNCH.transpose(1, 2)


class _CudnnAttention(torch.autograd.Function):
    """Attention of the last C of E tokens with a kernel whose causal mask needs as many queries as keys.

    The keys before the queries' own, which all queries see, and their own are attended to separately, and the results
    merged by their logarithms of sums, as in ring attention (torch's _templated_ring_attention). The gradients of each
    part follow from the merged result, since softmax's are those of its normalized values.
    """

    @staticmethod
    def forward(ctx: Any, q_BNCH: Tensor, k_BKEH: Tensor, v_BKEH: Tensor, scale: float | None) -> Tensor:
        parts = _parts(k_BKEH.shape[2], num_own=q_BNCH.shape[2])
        ctx.scale = scale
        results = [cudnn_forward(q_BNCH, k_BKEH[:, :, own], v_BKEH[:, :, own], causal, scale) for own, causal in parts]
        (out_BNCH, sums_BNC1, *random), *others = results
        for other_BNCH, other_BNC1, *other_random in others:
            difference = other_BNC1 - sums_BNC1
            change = torch.sigmoid(difference) * (other_BNCH.float() - out_BNCH.float())
            out_BNCH = (out_BNCH.float() + change).type_as(q_BNCH)
            sums_BNC1 = sums_BNC1 - F.logsigmoid(-difference)
            random += other_random
        ctx.save_for_backward(q_BNCH, k_BKEH, v_BKEH, out_BNCH, sums_BNC1, *random)
        return out_BNCH

    @staticmethod
    def backward(ctx: Any, gradient_BNCH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BNCH, k_BKEH, v_BKEH, out_BNCH, sums_BNC1, *random = ctx.saved_tensors
        if gradient_BNCH.stride() != out_BNCH.stride():  # of which torch's cache of cuDNN's kernels knows nothing
            gradient_BNCH = torch.empty_like(out_BNCH).copy_(gradient_BNCH)
        gradients = [
            cudnn_backward(
                gradient_BNCH,
                q_BNCH,
                k_BKEH[:, :, keys],
                v_BKEH[:, :, keys],
                out_BNCH,
                sums_BNC1,
                (random[2 * number], random[2 * number + 1]),
                is_causal,
                ctx.scale,
            )
            for number, (keys, is_causal) in enumerate(_parts(k_BKEH.shape[2], num_own=q_BNCH.shape[2]))
        ]
        if len(gradients) == 1:
            return *gradients[0], None
        of_q, of_k, of_v = zip(*gradients, strict=True)
        return of_q[0] + of_q[1], torch.cat(of_k, dim=2), torch.cat(of_v, dim=2), None


def cudnn_may_give_nan(num_before: int) -> bool:
    """Whether cuDNN before 9.26, on Hopper, may have NaN in the gradient of q with this many keys before its own.

    Without a causal mask, if a row's logarithm of sums is below -88.7 (pytorch#196678).
    """
    return num_before % 128 == 64


def _parts(num_keys: int, *, num_own: int) -> list[tuple[slice, bool]]:
    """The keys of each call of the kernel, and whether it is causal."""
    num_before = num_keys - num_own
    own = (slice(num_before, None), True)
    return [(slice(num_before), False), own] if num_before else [own]


def cudnn_forward(
    q_BNCH: Tensor, k_BKEH: Tensor, v_BKEH: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """The result, the logarithm of each row's sum [B, N, C, 1] in fp32, and dropout's random state, which is unused."""
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, sums, _, _, _, _, seed, offset, _ = attention(q_BNCH, k_BKEH, v_BKEH, None, True, 0.0, is_causal, scale=scale)
    return out, sums, seed, offset


def cudnn_backward(
    gradient_BNCH: Tensor,
    q_BNCH: Tensor,
    k_BKEH: Tensor,
    v_BKEH: Tensor,
    out_BNCH: Tensor,
    sums_BNC1: Tensor,
    random: tuple[Tensor, Tensor],
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, for results of this and other keys."""
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(gradient_BNCH, q_BNCH, k_BKEH, v_BKEH, out_BNCH, sums_BNC1, *random, None, None, None),
        *(q_BNCH.shape[2], k_BKEH.shape[2], 0.0, is_causal),
        scale=scale,
    )
    return gradients


def apply_cp(
    model: ModelPart,
    group: dist.ProcessGroup,
    *,
    uses_cudnn: bool = False,
    masked: Mapping[str, MaskedAttention] | None = None,
) -> None:
    """Replace the inner attention of every layer. `uses_cudnn`: attend with cuDNN's kernel, but layers in `masked`.

    Latent attention gathers latents, before it makes keys and values of them.
    """
    for name, layer, *_ in blocks_of(model):
        attention: Any = layer.attention
        is_latent = isinstance(attention, LatentAttention)
        if is_latent:
            attention.key_context = GatheredKeyContext(group)
        attention.inner_attention = ContextParallelAttention(
            group,
            gathers=not is_latent,
            uses_cudnn=uses_cudnn,
            masked=(masked or {}).get(name),
            kind=kind_of(layer),
        )
