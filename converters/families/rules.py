"""Rules that map names and tensors: rename, permute, drop. A table is written in one direction; ops are invertible."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Same:
    """Unchanged values."""


@dataclass(frozen=True, slots=True)
class RopeHalves:
    """Rows of q or k in each head: native interleaved pairs (0,1)(2,3)… ⇄ foreign halves (0,h/2)(1,h/2+1)….

    Reading native row `2*i + j` of a head takes foreign row `j * head_dim/2 + i`. A head is head_dim rows, so
    that k, which has fewer of them under GQA, cannot be taken for q.
    """


@dataclass(frozen=True, slots=True)
class Stacked:
    """One native tensor ⇄ one foreign tensor per expert, whose name has `{e}`; experts are stacked along dim 0."""


@dataclass(frozen=True, slots=True)
class Half:
    """One native tensor ⇄ a half of a foreign one along `dim`: number 0 or 1. Rules of one name make up the whole."""

    number: int
    dim: int


@dataclass(frozen=True, slots=True)
class Rows:
    """One native tensor ⇄ the rows of a foreign one of `total` rows from `start` on, such as q of a fused qkv.

    Rules of one name make up the whole, in the order of their rows.
    """

    start: int
    total: int


@dataclass(frozen=True, slots=True)
class Transposed:
    """The last two dims of a foreign tensor, or of its half, are exchanged: native [E, F, D] ⇄ foreign [E, D, F]."""

    of: Same | Half = Same()


@dataclass(frozen=True, slots=True)
class Zeros:
    """The foreign naming has no name for the native tensor, which then is zero; `reason` says why.

    Reading gives zeros. Only zeros can be written.
    """

    reason: str


Op = Same | RopeHalves | Stacked | Half | Rows | Transposed | Zeros


@dataclass(frozen=True, slots=True)
class Rule:
    """`native` ⇄ `foreign`, `{n}` standing for the layer number; `op` maps foreign values to native ones."""

    native: str
    foreign: str
    op: Op = Same()


OTHER_MEDIUM = "of the encoder of another medium, "  # how reasons begin of what a text model computes without


@dataclass(frozen=True, slots=True)
class Drop:
    """A foreign key that is not needed. The report lists it with its reason.

    `pattern` may contain `{n}`, and `{*}` for any text.
    """

    pattern: str
    reason: str
    is_of_rank: bool = False  # Meta's shards need not agree on it: nothing of it is compared
