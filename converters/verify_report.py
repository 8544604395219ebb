"""What `titan verify` found out: checks in the order they were made, and a verdict that claims nothing beyond them."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One check and what came of it; `problems` list every offender, of a warning what was seen."""

    name: str
    outcome: Literal["ok", "warning", "failed", "not possible", "not done"]
    detail: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All checks in the order they were made. `non_finite`: tensors that hold NaN or infinity, which is no damage."""

    path: str
    container: str
    checks: tuple[Check, ...]
    num_tensors: int
    num_bytes: int
    non_finite: dict[str, int]

    @property
    def ok(self) -> bool:
        return not any(check.outcome == "failed" for check in self.checks)

    @property
    def verdict(self) -> str:
        """The whole report in one clause, which claims nothing that was not checked."""
        if not self.ok:
            return "FAILED"
        left = [check.name for check in self.checks if check.outcome in ("not possible", "not done")]
        warned = [check.name for check in self.checks if check.outcome == "warning"]
        parts = ["nothing wrong was found" if left else "all checks passed"]
        if warned:
            parts.append(f"with warnings: {', '.join(warned)}")
        if left:
            parts.append(f"not checked: {', '.join(left)}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "verdict": self.verdict, **asdict(self)}
