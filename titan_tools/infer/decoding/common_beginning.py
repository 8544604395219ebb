"""Which tokens several sequences begin with: what is in the cache for one of them need not be computed for another."""

from collections.abc import Sequence

# Tokens in common below which a copy between rows, or a pass of its own for what prompts share, takes longer than
# computing them once more beside other tokens: on a GPU a pass of few tokens takes as long as one of hundreds.
LEAST_SHARED = {"cpu": 32, "cuda": 256}


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with. `a` and `b` are of one type; their parts are compared in C, by bisection."""
    same, most = 0, min(len(a), len(b))
    while same < most:
        middle = (same + most + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same


def is_worth_keeping(num: int, num_tokens: int) -> bool:
    """Whether a row goes on behind its own first `num` of `num_tokens`, or computes all anew.

    Behind earlier tokens attention takes a mask, which costs a CPU as much as 40 of 512 tokens.
    """
    return 8 * num >= num_tokens
