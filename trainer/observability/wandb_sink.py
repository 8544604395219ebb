"""Metrics to Weights & Biases. A missing package or an unreachable server is reported once and never stops a run."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from trainer.observability.log import note
from trainer.observability.sinks import LoggedRun, finite

# Environment variables that torchtitan reads, by the argument of `wandb.init`; wandb itself reads the others
_VARIABLES = {
    "entity": "WANDB_TEAM",
    "project": "WANDB_PROJECT",
    "name": "WANDB_RUN_NAME",
    "id": "WANDB_RUN_ID",
    "notes": "WANDB_RUN_NOTES",
    "tags": "WANDB_RUN_TAGS",
    "group": "WANDB_RUN_GROUP",
    "job_type": "WANDB_RUN_JOB_TYPE",
    "resume_from": "WANDB_RESUME_FROM",
    "fork_from": "WANDB_FORK_FROM",
}
_PROJECT = "titan"


class WandbSink:
    """A run at Weights & Biases, or on disk under WANDB_MODE=offline. `run_id` is None where it could not be opened."""

    def __init__(self, logged: LoggedRun, *, run_id: str | None):
        """`run_id` is the run that a resumed run continues; WANDB_RUN_ID takes precedence."""
        self._run: Any = None
        self._attempt("cannot be used", lambda: self._open(logged, run_id))

    @property
    def run_id(self) -> str | None:
        return None if self._run is None else str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            self._attempt("failed", lambda: self._run.log(finite(metrics), step=step))

    def close(self) -> None:
        if self._run is not None:
            self._attempt("failed", lambda: self._run.finish())

    def _open(self, logged: LoggedRun, run_id: str | None) -> None:
        import wandb

        given: dict[str, Any] = {argument: os.environ.get(name) or None for argument, name in _VARIABLES.items()}
        given["project"] = given["project"] or _PROJECT
        given["id"] = given["id"] or run_id
        given["tags"] = given["tags"].split(",") if given["tags"] else None
        continues = bool(given["id"]) and not (given["resume_from"] or given["fork_from"])
        self._run = wandb.init(
            **given,
            resume="allow" if continues else None,
            dir=str(logged.dump_folder),
            config=dict(logged.config),
        )

    def _attempt(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # of whatever kind: a run must not end for its metrics
            self._run = None
            reason = "the package is not installed: pip install 'titan-tools[wandb]'"
            if not isinstance(error, ImportError):
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
            note(f"WARNING: Weights & Biases {what}, training continues without it: {reason}")
