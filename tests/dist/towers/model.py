"""Two towers in plain PyTorch: blocks of a condition, then attention blocks of an image's patches.

B images, P patches (of this context shard), Q of all, D model dim, N heads, H head dim.
"""

import torch
import torch.nn.functional as F
from torch import nn

from towers.family import CHANNELS, CLASSES, PATCH
from trainer.api import ModelPart, Unit


class ConditionBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.up, self.down = nn.Linear(args.dim, args.hidden), nn.Linear(args.hidden, args.dim)

    def forward(self, c_BD):
        return c_BD + self.down(F.gelu(self.up(c_BD)))


class AllPatches(nn.Module):
    """The keys and values of all patches are here."""

    def forward(self, kv_B2PNH):
        return kv_B2PNH


class ImageBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.num_heads, self.head_dim = args.num_heads, args.dim // args.num_heads
        self.norm = nn.RMSNorm(args.dim, eps=1e-5)
        self.qkv, self.out = nn.Linear(args.dim, 3 * args.dim), nn.Linear(args.dim, args.dim)
        self.up, self.down = nn.Linear(args.dim, args.hidden), nn.Linear(args.hidden, args.dim)
        self.gather: nn.Module = AllPatches()

    def forward(self, x_BPD, c_BD):
        qkv = self.qkv(self.norm(x_BPD + c_BD.unsqueeze(1))).unflatten(-1, (3, self.num_heads, self.head_dim))
        q_BPNH, kv_BP2NH = qkv[:, :, 0], self.gather(qkv[:, :, 1:])
        k_BQNH, v_BQNH = kv_BP2NH.unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q_BPNH, k_BQNH, v_BQNH))
        x_BPD = x_BPD + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x_BPD + self.down(F.gelu(self.up(x_BPD)))


class Towers(ModelPart):
    def __init__(self, args):
        super().__init__()
        self.dim, self.num_before = args.dim, args.num_condition_blocks
        self.patches = nn.Linear(CHANNELS * PATCH, args.dim)
        self.condition = nn.Linear(CLASSES + 1, args.dim)
        self.condition_blocks = nn.ModuleDict({str(n): ConditionBlock(args) for n in range(args.num_condition_blocks)})
        self.image_blocks = nn.ModuleDict({str(n): ImageBlock(args) for n in range(args.num_image_blocks)})
        self.norm = nn.RMSNorm(args.dim, eps=1e-5)
        self.head = nn.Linear(args.dim, CHANNELS * PATCH)

    def units(self):
        units = [
            Unit("patches", self.patches, "first"),
            Unit("condition", self.condition, "first"),
            *(Unit(f"condition_blocks.{n}", block, number=int(n)) for n, block in self.condition_blocks.items()),
            *(Unit(f"image_blocks.{n}", b, number=int(n) + self.num_before) for n, b in self.image_blocks.items()),
            Unit("norm", self.norm, "last"),
            Unit("head", self.head, "last"),
        ]
        return [unit for unit in units if unit.module is not None]

    def forward(self, x, condition, places):
        """Noisy patches [B, P, CHANNELS · PATCH], classes and times [B, CLASSES + 1], places of patches [P].

        A pipeline stage but the first gets instead of `x` what the one before returned: both streams, [B, P + 1, D].
        """
        if self.patches is None:
            x_BPD, c_BD = x[:, :-1], x[:, -1]
        else:
            frequencies_D = torch.arange(self.dim, device=x.device, dtype=torch.float32) / self.dim
            x_BPD = self.patches(x) + torch.cos(places.unsqueeze(1) * 0.1**frequencies_D).type_as(x)
            c_BD = self.condition(condition)
        for block in self.condition_blocks.values():
            c_BD = block(c_BD)
        for block in self.image_blocks.values():
            x_BPD = block(x_BPD, c_BD)
        if self.head is None:
            return torch.cat((x_BPD, c_BD.unsqueeze(1)), dim=1)
        return self.head(self.norm(x_BPD))
