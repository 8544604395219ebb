"""The failure of ranks that their parent reports: the one that caused the others, once."""

import signal
import sys
from collections.abc import Sequence
from typing import Any

from converters.common.errors import TitanError
from titan_tools.terminal.interrupts import Terminated, terminate

_AGENT_GRACE_SECS = 25  # a little less than the agent waits between SIGTERM and SIGKILL


class RankFailure(TitanError):
    """A rank failed; carries its message, kind and exit code."""

    def __init__(self, message: str, *, exit_code: int, hint: str = "", tries: Sequence[str] = (), kind: str = "rank"):
        super().__init__(message, hint=hint, tries=tries)
        self.exit_code = exit_code
        self.kind = kind


def stopped_while_starting() -> RankFailure:
    """The failure if a stop request comes before any rank trains."""
    return RankFailure("stopped on request while starting: there was nothing to save yet", exit_code=75)


def end_start_at_stop_request() -> None:
    """Until the agent takes signals, let SIGTERM and SIGUSR1 end this process as `stopped_while_starting`."""
    Terminated.error = stopped_while_starting()
    signal.signal(signal.SIGUSR1, terminate)


_WHY_ENDED = {
    signal.SIGKILL: "the kernel sends SIGKILL when memory runs out",
    signal.SIGABRT: "NCCL's watchdog sends SIGABRT to a rank whose collective timed out; its message is above, and the"
    " collectives of each rank are recorded in comm.save_traces_folder",
}


def raise_first_failure(failures: dict[int, Any], *, saves: bool = True) -> int:
    """Raise the failure that caused the others; return the exit code if no rank left a message.

    When a rank fails, the agent ends the others with SIGTERM, and with SIGKILL after 30 more seconds. Both are ignored.
    """
    reported = {rank: f.error_file_data["titan"] for rank, f in failures.items() if "titan" in f.error_file_data}
    first = min(reported, key=lambda rank: reported[rank]["secs"], default=None)
    ended = {rank: signal.Signals(-f.exitcode) for rank, f in failures.items() if f.exitcode < 0}
    # If a rank hung, the agent killed it at the end; the cause is the rank that timed out on it and was aborted
    for rank, number in sorted(ended.items(), key=lambda item: (item[1] == signal.SIGKILL, item)):
        by_agent = first is not None and failures[rank].timestamp - reported[first]["secs"] > _AGENT_GRACE_SECS
        if number not in (signal.SIGTERM, signal.SIGUSR1) and not by_agent:
            raise RankFailure(f"rank {rank} was ended by {number.name}", exit_code=3, hint=_WHY_ENDED.get(number, ""))
    if first is not None:
        error = reported[first]
        if error["traceback"]:
            print(f"rank {first}:\n{error['traceback']}", end="", file=sys.stderr, flush=True)
        if not error["message"]:
            return int(error["exit_code"])
        raise RankFailure(**{key: error[key] for key in ("message", "exit_code", "hint", "tries", "kind")})
    codes = [f.exitcode for f in failures.values() if f.exitcode > 0]
    if not codes and not saves:
        raise RankFailure("the ranks were ended by SIGTERM from outside", exit_code=143)
    if not codes:  # the stop request came before any rank had installed its handler
        raise stopped_while_starting()
    return int(codes[0])
