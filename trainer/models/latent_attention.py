"""Multi-head latent attention in plain PyTorch (arXiv 2405.04434, section 2.1).

Shape letters: B batch, L tokens (of the sequence shard at hand), T = B * L, S tokens whose keys are seen, D model dim,
N heads, H features of a head of q and k, P rotated ones of them, R size of the latent of keys and values, V features of
a head of v, X features of several latents. N is what this rank holds, so it is inferred with -1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from converters.families.args import DecoderArgs
from converters.families.blocks import Latent, Rope, Temperature
from trainer.models.attention import CausalAttention
from trainer.models.norms import make_norm
from trainer.models.rope import PositionFeatures, position_features, rotate


class KeyContext(nn.Module):
    """The latents and rotated keys of all tokens that the queries at hand may see: these tokens alone.

    Replace it if other ranks have some of them, or earlier calls.
    """

    def forward(self, latent_BLR: Tensor, k_BL1P: Tensor) -> tuple[Tensor, Tensor]:
        return latent_BLR, k_BL1P


class LatentAttention(nn.Module):
    """Attention around `inner_attention(q_BLNH, k_BSNH, v_BSNV, scale=…) -> out_BLNV`.

    Keys and values are made of a latent of each token, and of a rotated key that all heads share. `latents` returns
    what all heads read, its input; replace it if ranks hold parts of the heads and of the tokens.
    """

    def __init__(self, args: DecoderArgs, latent: Latent, features: Sequence[Rope | Temperature] = ()):
        """`features`: as of GroupedQueryAttention."""
        super().__init__()
        self.rope_number = (features or position_features([latent])).index(latent.rope)
        self.head_dim, self.scale, self.q_rank = args.head_dim, latent.scale, latent.q_rank
        self.kv_rank, self.rotary_dim = latent.kv_rank, latent.rotary_dim
        self.plain_dim, self.value_dim = latent.plain_dim, latent.value_dim
        q_rows = args.num_heads * args.head_dim
        if latent.q_rank:
            self.wq_a = nn.Linear(args.dim, latent.q_rank, bias=False)
            self.q_norm = make_norm(latent.norm, latent.q_rank)
            self.wq_b = nn.Linear(latent.q_rank, q_rows, bias=False)
        else:
            self.wq = nn.Linear(args.dim, q_rows, bias=False)
        self.wkv_a = nn.Linear(args.dim, latent.kv_rank + latent.rotary_dim, bias=False)
        self.kv_norm = make_norm(latent.norm, latent.kv_rank)
        self.wkv_b = nn.Linear(latent.kv_rank, args.num_heads * (latent.plain_dim + latent.value_dim), bias=False)
        self.wo = nn.Linear(args.num_heads * latent.value_dim, args.dim, bias=False)
        self.latents: nn.Module = nn.Identity()
        self.key_context: nn.Module = KeyContext()
        self.inner_attention: nn.Module = CausalAttention()

    def forward(self, x_BLD: Tensor, rotations: PositionFeatures, **mask: Any) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)  # before torch 2.13, DTensor cannot flatten token shards for a product
        latent_TR, k_TP = torch.split(self.wkv_a(x_TD), [self.kv_rank, self.rotary_dim], dim=-1)
        read = [self.kv_norm(latent_TR), k_TP]
        if self.q_rank:  # with the others, so that they are gathered at once
            read.append(self.q_norm(self.wq_a(x_TD)))
        read_BLX = torch.cat(read, dim=-1).view(*x_BLD.shape[:2], -1)
        latent_BLR, k_BLP, *q_latent = self.latents(read_BLX).split([each.shape[-1] for each in read], dim=-1)
        q_BLX = self.wq_b(*q_latent) if self.q_rank else self.wq(x_BLD)
        angles = rotations[self.rope_number]
        q_BLNH = self._rotate_last(q_BLX.unflatten(-1, (-1, self.head_dim)), angles)
        latent_BSR, k_BS1P = self.key_context(latent_BLR, rotate(k_BLP.unsqueeze(2), angles))
        k_BSNH, v_BSNV = self.expand(latent_BSR, k_BS1P)
        out_BLNV = self.inner_attention(q_BLNH, k_BSNH, v_BSNV, scale=self.scale, **mask)
        out_BLD: Tensor = self.wo(out_BLNV.flatten(-2))
        return out_BLD

    def _rotate_last(self, q_BLNH: Tensor, angles: Tensor) -> Tensor:
        plain, rotated = torch.split(q_BLNH, [self.plain_dim, self.rotary_dim], dim=-1)
        return torch.cat((plain, rotate(rotated, angles)), dim=-1)

    def expand(self, latent_BSR: Tensor, k_BS1P: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of every head here."""
        kv_BSNX = self.wkv_b(latent_BSR).unflatten(-1, (-1, self.plain_dim + self.value_dim))
        plain, v_BSNV = torch.split(kv_BSNX, [self.plain_dim, self.value_dim], dim=-1)
        return torch.cat((plain, k_BS1P.expand(-1, -1, plain.shape[2], -1)), dim=-1), v_BSNV
