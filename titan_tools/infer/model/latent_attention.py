"""Latent attention of inference: the cache holds the latent of each token, and a decode step attends to latents.

A head's plain key is a product of the latent c with the head's rows K of wkv_b, so its score with a query q is
(q·K)·c: many heads share the one key c. The sum over values is likewise a sum of latents, multiplied once (DeepSeek V2,
arXiv 2405.04434, section 2.1.2). A prompt has many queries; there it is cheaper to compute the keys and values
themselves.

Shape letters: B batch, L tokens, T cached tokens, N heads of this rank, R size of the latent, P plain, O rotary and V
value features of a head, C = R + O numbers cached for each token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from converters.families.blocks import Latent
from trainer.models.rope import PositionFeatures, rotate


class LatentAttention(nn.Module):
    """Replaces the model's module, whose layers it takes over; `inner_attention` is set where a cache is attached."""

    wq: Any
    wq_a: Any
    q_norm: Any
    wq_b: Any
    wkv_a: Any
    kv_norm: Any
    wkv_b: Any
    wo: Any
    inner_attention: Any

    def __init__(self, attention: Any, numbers: Latent):
        super().__init__()
        self.numbers, self.rope_number = numbers, attention.rope_number
        self.head_dim = numbers.kv_rank + numbers.rotary_dim  # of what is cached
        for name, layer in attention.named_children():
            if list(layer.parameters(recurse=False)):
                self.add_module(name, layer)

    def forward(self, x_BLD: Tensor, rotations: PositionFeatures) -> Tensor:
        n, angles = self.numbers, rotations[self.rope_number]
        q_BLNH = self._queries(x_BLD)
        plain_BLNP, turned_BLNO = torch.split(q_BLNH, [n.plain_dim, n.rotary_dim], dim=-1)
        turned_BLNO = rotate(turned_BLNO, angles)
        latent_BLR, key_BLO = torch.split(self.wkv_a(x_BLD), [n.kv_rank, n.rotary_dim], dim=-1)
        key_BL1O = rotate(key_BLO.unsqueeze(-2), angles)
        cached_BL1C = torch.cat((self.kv_norm(latent_BLR).unsqueeze(-2), key_BL1O), dim=-1)
        if self.inner_attention.expands:
            q_BLNH = torch.cat((plain_BLNP, turned_BLNO), dim=-1)
            out_BLNV = self.inner_attention(q_BLNH, cached_BL1C, cached_BL1C, n.scale)
        else:
            keys_NPR, values_NVR = self._rows_of_heads()
            q_BLNC = torch.cat((torch.einsum("blnp,npr->blnr", plain_BLNP, keys_NPR), turned_BLNO), dim=-1)
            out_BLNC = self.inner_attention(q_BLNC, cached_BL1C, cached_BL1C, n.scale)
            out_BLNV = torch.einsum("blnr,nvr->blnv", out_BLNC[..., : n.kv_rank], values_NVR)
        out_BLD: Tensor = self.wo(out_BLNV.flatten(-2))
        return out_BLD

    def _queries(self, x_BLD: Tensor) -> Tensor:
        n = self.numbers
        q_BLF = self.wq_b(self.q_norm(self.wq_a(x_BLD))) if n.q_rank else self.wq(x_BLD)
        q_BLNH: Tensor = q_BLF.unflatten(-1, (-1, n.plain_dim + n.rotary_dim))
        return q_BLNH

    def _rows_of_heads(self) -> tuple[Tensor, Tensor]:
        """The rows of wkv_b that make keys [N, P, R], and values [N, V, R]."""
        n = self.numbers
        rows: Tensor = self.wkv_b.weight.unflatten(0, (-1, n.plain_dim + n.value_dim))
        keys_NPR, values_NVR = torch.split(rows, [n.plain_dim, n.value_dim], dim=1)
        return keys_NPR, values_NVR

    def expand(self, cached_11TC: Tensor) -> tuple[Tensor, Tensor]:
        """The keys [1, N, T, P + O] and values [1, N, T, V] of cached tokens."""
        n = self.numbers
        latent_1TR, key_1TO = torch.split(cached_11TC[:, 0], [n.kv_rank, n.rotary_dim], dim=-1)
        both_1TNF = self.wkv_b(latent_1TR).unflatten(-1, (-1, n.plain_dim + n.value_dim))
        plain_1NTP, values_1NTV = torch.split(both_1TNF.transpose(1, 2), [n.plain_dim, n.value_dim], dim=-1)
        key_1NTO = key_1TO.unsqueeze(1).expand(-1, plain_1NTP.shape[1], -1, -1)
        return torch.cat((plain_1NTP, key_1NTO), dim=-1), values_1NTV
