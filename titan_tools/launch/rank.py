"""A rank's side of a launch: what it tells the process that started it."""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from converters.common.errors import TitanError
from titan_tools.installation import explain
from titan_tools.launch.launched import PARENT_PID, STEP_DONE
from titan_tools.terminal.machine_errors import PIPE_CLOSED, as_machine_error, as_memory_error, reader_is_gone
from trainer.config.custom_import import error_of_import, where_to_look
from trainer.ranks.rendezvous import launched
from trainer.ranks.signals import die_with_parent

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the agent names a file per rank for its error


def inside_launch() -> bool:
    """True on a rank that torchrun, a scheduler or `run_ranks` started. Raises ConfigError for invalid variables."""
    return launched() is not None


def report_step_done(lost: str) -> None:
    """Tell `run_ranks` that the ranks take Ctrl-C as a request from now on, and what a second one would lose."""
    Path(os.environ[STEP_DONE]).write_text(lost)


@contextmanager
def rank_errors(*, less_memory: Sequence[str] = ()) -> Iterator[None]:
    """Around the work of a rank: end with the parent process, and let the parent report errors if it is ours.

    `less_memory`: `try:` lines for out of memory.
    """
    if not os.environ.get(PARENT_PID):
        yield
        return
    die_with_parent(int(os.environ[PARENT_PID]))
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and not error_of_import(error):
            raise
        exit_code = _leave_message(error, less_memory)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # closed or full
                stream.flush()
        # Skip the interpreter's exit: tearing down a process group with a dead peer can hang.
        os._exit(exit_code)


def _leave_message(error: BaseException, less_memory: Sequence[str]) -> int:
    """Write the error to the agent's file, in the agent's form plus ours; return the exit code."""
    if cause := as_memory_error(error):
        error = TitanError(f"{cause.message} on rank {os.environ.get('RANK', 0)}", hint=cause.hint, tries=less_memory)
    elif isinstance(error, OSError):
        error = as_machine_error(error) or error
    exit_code, text, hint, trace, kind = 3, f"{type(error).__name__}: {error}", "", "", "internal"
    tries: Sequence[str] = ()
    if isinstance(error, BrokenPipeError) and reader_is_gone():  # nothing to report
        exit_code, text = PIPE_CLOSED, ""
    elif isinstance(error, TitanError):
        exit_code, text, hint, tries, kind = error.exit_code, error.message, error.hint, error.tries, error.kind
    elif isinstance(error, KeyboardInterrupt):
        exit_code, text, kind = 130, "interrupted", "interrupted"
    elif of_import := error_of_import(error):
        shown, trace = of_import
        exit_code, text, hint, kind = shown.exit_code, shown.message, shown.hint, shown.kind
    elif problem := explain(error):
        text, hint, tries, exit_code = problem
        kind = "installation"
    else:
        hint, trace = where_to_look(), "".join(traceback.format_exception(error))
    now = time.time()
    record = {"secs": now, "exit_code": exit_code, "message": text, "hint": hint, "tries": [*tries], "kind": kind}
    record["traceback"] = trace
    agent_record = {"message": text, "extraInfo": {"timestamp": str(int(now))}}
    try:
        Path(os.environ[_ERROR_FILE]).write_text(json.dumps({"message": agent_record, "titan": record}))
    except (KeyError, OSError):  # no file: rather report it twice than not at all
        print(f"error: {text}\n{trace}", file=sys.stderr)
    return exit_code
