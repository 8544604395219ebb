"""The report of `titan verify`: the checks in order, and a verdict that claims nothing beyond them."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from converters.common.names import MANIFEST


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its outcome; `problems` list every offender."""

    name: str
    outcome: Literal["ok", "warning", "changed", "failed", "not possible", "not done"]
    detail: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences from the manifest that `titan verify --accept` replaces: name → difference."""

    files: dict[str, str]
    tensors: dict[str, str]
    num_tensors: int
    unreadable: str = ""  # why the old manifest could not be read


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All checks in the order they were made. `non_finite`: tensors that hold NaN or infinity, which is not damage.

    `changes`: what was accepted; None if nothing was accepted, and without `--accept`.
    """

    path: str
    container: str
    checks: tuple[Check, ...]
    num_tensors: int
    num_bytes: int
    non_finite: dict[str, int]
    changes: Changes | None = None

    @property
    def ok(self) -> bool:
        return not any(check.outcome == "failed" for check in self.checks)

    @property
    def verdict(self) -> str:
        """The report in one clause."""
        if not self.ok:
            return "FAILED"
        unchecked = [check.name for check in self.checks if check.outcome in ("not possible", "not done")]
        warned = [check.name for check in self.checks if check.outcome == "warning"]
        parts = [
            _accepted(self.changes) if self.changes else "nothing wrong was found" if unchecked else "all checks passed"
        ]
        if warned:
            parts.append(f"with warnings: {', '.join(warned)}")
        if unchecked:
            parts.append(f"not checked: {', '.join(unchecked)}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "verdict": self.verdict, **asdict(self)}


def _accepted(changes: Changes) -> str:
    if changes.unreadable:
        return f"{MANIFEST} was rewritten; the old one was damaged, so files and values could not be compared with it"
    if not changes.files and not changes.tensors:
        return f"nothing has changed since titan wrote it; {MANIFEST} was not changed"
    files, tensors = len(changes.files), len(changes.tensors)
    what = f"{files:,} file{'' if files == 1 else 's'}, {tensors:,} of {changes.num_tensors:,} tensors"
    return f"{MANIFEST} was rewritten; changed: {what}"
