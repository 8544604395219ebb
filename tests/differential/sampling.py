"""Which cases of the differential test run in the normal set; the others are marked slow."""

from collections.abc import Container, Sequence
from typing import Any

import pytest


def chosen(cases: Sequence[Any], sample: Container[Any]) -> list[Any]:
    """Each case as a parameter of a test; `sample` is the normal set."""
    return [_case(case, is_slow=case not in sample) for case in cases]


def every(cases: Sequence[tuple], *, num: int) -> list[Any]:
    """The same for many cases, of which `num` at equal distances are the normal set."""
    step = len(cases) // num
    return [_case(case, is_slow=place % step != 0) for place, case in enumerate(cases)]


def _case(case: Any, *, is_slow: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, id=" ".join(map(str, values)).replace("::", ":"), marks=[pytest.mark.slow] * is_slow)
