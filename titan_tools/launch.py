"""Start N ranks on this machine with torch's elastic agent, or join a launch already under way.

The parent hears signals, passes them on, and tells one rank's error once; exit codes pass through.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from converters.errors import TitanError
from titan_tools.machine_errors import PIPE_CLOSED, as_machine_error, as_memory_error, reader_is_gone
from trainer.parent import die_with_parent

_STARTED_BY_US = "TITAN_LAUNCH"  # for ranks whose parent tells their errors: that parent's process id
_AGENT_PATIENCE_SECS = 25  # a little less than the agent waits before it kills
_GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")  # NVIDIA; AMD; Windows' GPUs under WSL
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the agent gives each rank a file of its own to say why it died


class RankFailure(TitanError):
    """A rank ended; carries that rank's message and exit code to the one place that prints."""

    def __init__(self, message: str, *, exit_code: int, hint: str = "", tries: Sequence[str] = ()):
        super().__init__(message, hint=hint, tries=tries)
        self.exit_code = exit_code


def inside_launch() -> bool:
    """True on a rank that torchrun, a scheduler or `run_ranks` has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_by_titan() -> bool:
    """True on a rank of `run_ranks`: its parent has looked at everything that need be looked at only once."""
    return bool(os.environ.get(_STARTED_BY_US))


def count_gpus() -> int:
    """GPUs that torch can use here, those that CUDA_VISIBLE_DEVICES hides not counted; 0 on a machine without."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if is_hidden or not any(path for pattern in _GPU_DEVICES for path in Path("/dev").glob(pattern)):
        return 0  # told without the seconds that importing torch takes
    import torch

    return torch.cuda.device_count()


TITAN = ("-P", "-m", "titan_tools")  # -P: no `trainer` folder of the working directory may stand in for ours


def run_ranks(argv: Sequence[str], *, nproc: int, program: Sequence[str] = TITAN, saves: bool = True) -> int:
    """Run `titan ARGV…` on `nproc` ranks and return its exit code; `program` are Python's arguments before ARGV.

    `saves`: asked to stop, the ranks save and leave. Else SIGTERM ends them now, and then does what it did before.
    Raises RankFailure with the message of the rank that failed first, and KeyboardInterrupt after Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="titan-launch-") as folder:
        agent = _build_agent((*program, *argv), nproc=nproc, folder=folder)
        with _signals_passed_on(agent, saves=saves):
            try:
                result = agent.run()
            finally:
                agent.get_worker_group().spec.rdzv_handler.shutdown()
    return _tell_first_failure(result.failures, saves=saves) if result.is_failed() else 0


def _build_agent(args: Sequence[str], *, nproc: int, folder: str) -> Any:
    import torch.distributed.elastic.rendezvous.registry as rdzv_registry
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    # The agent reports every rank it stops; what went wrong is told by `_tell_first_failure`, once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    os.environ[_STARTED_BY_US] = str(os.getpid())
    # the working folder is not on the ranks' path (-P): say where this very package lies
    home = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    rendezvous = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
    )
    spec = WorkerSpec(
        role="titan",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=tuple(args),
        rdzv_handler=rdzv_registry.get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    return LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=folder))


@contextmanager
def _signals_passed_on(agent: Any, *, saves: bool) -> Iterator[None]:
    """SIGTERM and SIGUSR1 go to the ranks, which save and leave with 75; a second SIGTERM, or Ctrl-C, ends them now.

    So does the first SIGTERM where there is nothing to save. The agent's own handling would give the ranks 30 seconds
    and lose their exit code.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    asked_before = leaves = False

    def to_ranks(number: int) -> None:
        for worker in agent.get_worker_group().workers:
            if isinstance(worker.id, int):  # a string until it is started
                try:
                    os.kill(worker.id, number)
                except ProcessLookupError:
                    continue

    def ask_to_stop(number: int, frame: Any) -> None:
        nonlocal asked_before
        if asked_before and number == signal.SIGTERM:
            leave_now(number, frame)
        asked_before = asked_before or number == signal.SIGTERM
        to_ranks(number)

    def leave_now(number: int, frame: Any) -> None:
        nonlocal leaves
        leaves = True
        to_ranks(signal.SIGKILL)
        raise KeyboardInterrupt

    def end_too(number: int, frame: Any) -> None:
        to_ranks(signal.SIGKILL)
        signal.signal(number, before[number])
        signal.raise_signal(number)

    handlers = {signal.SIGTERM: ask_to_stop, signal.SIGUSR1: ask_to_stop, signal.SIGINT: leave_now}
    if not saves:
        handlers = {signal.SIGTERM: end_too, signal.SIGINT: leave_now}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    except Exception:
        if not leaves:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if leaves:  # though the agent heard only of ranks that were killed: what was raised fell where Python ignores it
        raise KeyboardInterrupt


_WHY_ENDED = {
    signal.SIGKILL: "SIGKILL is what the kernel sends when memory runs out",
    signal.SIGABRT: "SIGABRT is how NCCL's watchdog ends a rank whose collective timed out; it has named it above, and"
    " each rank's record lies in comm.save_traces_folder",
}


def _tell_first_failure(failures: dict[int, Any], *, saves: bool = True) -> int:
    """Raise the failure that the others followed from; an exit code without a word is returned.

    When a rank fails the agent ends the others with SIGTERM, and with SIGKILL those that are stuck for 30 seconds more:
    neither is news.
    """
    told = {rank: f.error_file_data["titan"] for rank, f in failures.items() if "titan" in f.error_file_data}
    first = min(told, key=lambda rank: told[rank]["secs"], default=None)
    ended = {rank: signal.Signals(-f.exitcode) for rank, f in failures.items() if f.exitcode < 0}
    # A rank that hung is killed by the agent in the end; the one that gave it up, and was aborted for it, is the news
    for rank, number in sorted(ended.items(), key=lambda item: (item[1] == signal.SIGKILL, item)):
        by_agent = first is not None and failures[rank].timestamp - told[first]["secs"] > _AGENT_PATIENCE_SECS
        if number not in (signal.SIGTERM, signal.SIGUSR1) and not by_agent:
            raise RankFailure(f"rank {rank} was ended by {number.name}", exit_code=3, hint=_WHY_ENDED.get(number, ""))
    if first is not None:
        error = told[first]
        if error["traceback"]:
            print(f"rank {first}:\n{error['traceback']}", file=sys.stderr, flush=True)
        if not error["message"]:
            return error["exit_code"]
        raise RankFailure(error["message"], exit_code=error["exit_code"], hint=error["hint"], tries=error["tries"])
    codes = [f.exitcode for f in failures.values() if f.exitcode > 0]
    if not codes and not saves:
        raise RankFailure("the ranks were ended by SIGTERM from outside", exit_code=143)
    if not codes:  # a request to stop that came before any rank could listen
        raise RankFailure("stopped on request while starting: there was nothing to save yet", exit_code=75)
    return codes[0]


@contextmanager
def rank_errors(*, less_memory: Sequence[str] = ()) -> Iterator[None]:
    """Around a rank's work: dies with its parent, and leaves its error to the parent to tell, if the parent is ours.

    `less_memory`: what to try where memory runs out.
    """
    if not os.environ.get(_STARTED_BY_US):
        yield
        return
    die_with_parent(int(os.environ[_STARTED_BY_US]))
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        exit_code = _leave_message(error, less_memory)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # what could not be written before cannot be now
                stream.flush()
        # Not through the interpreter's exit: a process group with a dead peer may hang while it is torn down.
        os._exit(exit_code)


def _leave_message(error: BaseException, less_memory: Sequence[str]) -> int:
    """Write the error where the agent looks for it, in the agent's form plus ours; returns the exit code."""
    if told := as_memory_error(error):
        error = TitanError(f"{told.message} on rank {os.environ.get('RANK', 0)}", hint=told.hint, tries=less_memory)
    elif isinstance(error, OSError):
        error = as_machine_error(error) or error
    if isinstance(error, BrokenPipeError) and reader_is_gone():  # it has enough: nothing to tell
        exit_code, text, hint, tries, trace = PIPE_CLOSED, "", "", (), ""
    elif isinstance(error, TitanError):
        exit_code, text, hint, tries, trace = error.exit_code, error.message, error.hint, error.tries, ""
    elif isinstance(error, KeyboardInterrupt):
        exit_code, text, hint, tries, trace = 130, "interrupted", "", (), ""
    else:
        exit_code, text, tries = 3, f"{type(error).__name__}: {error}", ()
        hint, trace = "this is a fault of titan; the lines above say where", "".join(traceback.format_exception(error))
    now = time.time()
    ours = {"secs": now, "exit_code": exit_code, "message": text, "hint": hint, "tries": [*tries], "traceback": trace}
    theirs = {"message": text, "extraInfo": {"timestamp": str(int(now))}}
    try:
        Path(os.environ[_ERROR_FILE]).write_text(json.dumps({"message": theirs, "titan": ours}))
    except (KeyError, OSError):  # nowhere to leave it: better told twice than not at all
        print(f"error: {text}\n{trace}", file=sys.stderr)
    return exit_code
