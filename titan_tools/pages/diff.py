"""Print the page of `titan diff`: the differences, with layers folded, and a verdict."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from converters.common.fold import fold
from converters.diff import Difference, DiffReport
from titan_tools.terminal.console import count, table

_MOST_LINES = 100
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_DIMS = re.compile(r"\[[0, ]*\]")
_PLACE = re.compile(r", first at \[[\d, ]*\]")
_STATE = re.compile(r"(.*optimizer.*\.(?:state|param_groups)\.).+\.(\w+)")  # of a parameter, as inspect folds them


def print_differences(report: DiffReport, *, every: bool) -> None:
    """Print a report. `every`: one line per tensor, however many."""
    rows = [_row(d.name, [d]) for d in report.differences] if every else _folded(report.differences)
    shown = rows if every else rows[:_MOST_LINES]
    if shown:
        table(("name", "differs in", "tensors", "max |A-B|", "relative", "detail"), shown, drop=("relative",))
    if len(shown) < len(rows):
        print(f"… and {len(rows) - len(shown):,} more lines (--every lists all)")
    for where in dict.fromkeys(report.not_compared.values()):
        sections = (section for section, reason in report.not_compared.items() if reason == where)
        print(f"not compared ({where}): {', '.join(sections)}")
    for text in report.notes:
        print(f"not counted: {text}")
    for text in report.remarks:
        print(f"note: {text}")
    if report.first_tensor:
        print(f"first differing tensor: {report.first_tensor}")
    verdict = count(len(report.differences), "difference") if report.differences else "equal"
    print(f"{verdict}; {count(report.num_equal, 'tensor')} equal bit for bit (matched by {report.by})")


def _folded(differences: Sequence[Difference]) -> list[tuple[object, ...]]:
    """A row for tensors whose names and details differ only in numbers, with the largest of their differences; and one
    for each kind of optimizer state, and each setting, of all parameters that differ in it.
    """
    order = {d.name: at for at, d in enumerate(differences)}
    states: dict[tuple[str, ...], list[Difference]] = {}
    plain = []
    for difference in differences:
        if of_state := _STATE.fullmatch(difference.name):
            detail = _PLACE.sub("", difference.detail)
            key = (f"{of_state[1]}*.{of_state[2]}", difference.kind, _DIMS.sub("[0]", _NUMBER.sub("0", detail)))
            states.setdefault(key, []).append(replace(difference, detail=detail))
        else:
            plain.append(difference)
    groups = fold(plain, name=lambda d: d.name, alike=lambda d: (d.kind, _NUMBER.sub("0", d.detail)))
    groups += [(key[0] if len(members) > 1 else members[0].name, members) for key, members in states.items()]
    return [_row(name, members) for name, members in sorted(groups, key=lambda each: order[each[1][0].name])]


def _row(name: str, members: Sequence[Difference]) -> tuple[object, ...]:
    max_abs, relative = _largest([d.max_abs for d in members]), _largest([d.relative for d in members])
    return (
        name,
        members[0].kind,
        "" if members[0].kind == "model" else len(members),
        "" if max_abs is None else f"{max_abs:.3g}",
        "" if relative is None else f"{relative:.2e}",
        _details([d.detail for d in members]),
    )


def _largest(values: Sequence[float | None]) -> float | None:
    """The largest value; NaN is larger than all."""
    present = [value for value in values if value is not None]
    return max(present, key=lambda value: (math.isnan(value), value), default=None)


def _details(texts: Sequence[str]) -> str:
    """One text for texts that differ only in numbers, with the range of each: `3 … 64 of 64 values differ`.

    Empty if they have shapes of different lengths.
    """
    numbers = [_NUMBER.findall(text) for text in texts]
    if len({*map(len, numbers)}) > 1:
        return ""
    columns = [list(dict.fromkeys(column)) for column in zip(*numbers, strict=True)]
    ordered = [sorted(column, key=lambda text: float(text.replace(",", ""))) for column in columns]
    shown = iter([each[0] if len(each) == 1 else f"{each[0]} … {each[-1]}" for each in ordered])
    return _NUMBER.sub(lambda found: next(shown), texts[0])
