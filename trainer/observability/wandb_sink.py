"""Metrics to Weights & Biases. A missing package or an unreachable server is reported once and never stops a run."""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from trainer.observability.log import note
from trainer.observability.sinks import LoggedRun, finite
from trainer.observability.tags import torchtitan_tags

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
_LOGIN_SECS = 60  # to answer wandb's prompt for a key, which would otherwise wait forever
_FINISH_SECS = 300  # to upload the last metrics; they are on disk too
_FINISH_EARLY_SECS = 15  # after an error or a stop request: SIGKILL may follow soon


class WandbSink:
    """A run at Weights & Biases, or on disk under WANDB_MODE=offline. `run_id` is None if it could not be opened."""

    def __init__(self, logged: LoggedRun, *, run_id: str | None):
        """`run_id` is the run that a resumed run continues; WANDB_RUN_ID takes precedence."""
        self._run: Any = None
        self._exit_code, self._finish_secs = 0, _FINISH_SECS
        self._attempt("cannot be used", lambda: self._open(logged, run_id))

    @property
    def run_id(self) -> str | None:
        return None if self._run is None else str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            self._attempt("failed", lambda: self._run.log(torchtitan_tags(finite(metrics)), step=step))

    def end_early(self, *, failed: bool) -> None:
        """Before `close`, of a run that did not take its last step."""
        self._exit_code, self._finish_secs = int(failed), _FINISH_EARLY_SECS

    def close(self) -> None:
        """Upload the last metrics. Without a connection wandb would retry for hours, so the wait is limited."""
        if (run := self._run) is None:
            return
        finish = lambda: self._attempt("failed", lambda: run.finish(exit_code=self._exit_code))  # noqa: E731
        thread = threading.Thread(target=finish, name="wandb finish", daemon=True)
        thread.start()
        thread.join(self._finish_secs)
        if thread.is_alive():
            note(
                f"WARNING: Weights & Biases has not received all metrics within {self._finish_secs} s;"
                f" `wandb sync` uploads them from {run.dir}"
            )

    def _open(self, logged: LoggedRun, run_id: str | None) -> None:
        import wandb

        os.environ.setdefault("WANDB_LOGIN_TIMEOUT", str(_LOGIN_SECS))  # login does not see the settings of `init`
        options: dict[str, Any] = {argument: os.environ.get(name) or None for argument, name in _VARIABLES.items()}
        options["project"] = options["project"] or _PROJECT
        options["id"] = options["id"] or run_id
        options["tags"] = options["tags"].split(",") if options["tags"] else None
        fixed: dict[str, Any] = {"dir": str(logged.dump_folder), "config": dict(logged.config)}
        if not options["id"] or options["resume_from"] or options["fork_from"]:
            self._run = wandb.init(**options, **fixed)
            return
        if logged.num_logged > logged.num_done:  # else these steps would be dropped: W&B's only count up
            try:
                self._run = wandb.init(**options | {"resume_from": f"{options['id']}?_step={logged.num_done}"}, **fixed)
                return
            except Exception as error:  # of whatever kind: not every server can
                steps = f"{logged.num_done + 1} to {logged.num_logged}"
                note(
                    f"WARNING: Weights & Biases does not take back steps {steps}, which are run again, and keeps their"
                    f" first records: {_one_line(error)}"
                )
        self._run = wandb.init(**options, resume="allow", **fixed)

    def _attempt(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # of whatever kind: a run must not end for its metrics
            self._run = None
            reason = "the package is not installed: pip install 'titan-tools[wandb]'"
            if not isinstance(error, ImportError):
                reason = _one_line(error)
            note(f"WARNING: Weights & Biases {what}, training continues without it: {reason}")


def _one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
