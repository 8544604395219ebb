"""Start N ranks on this machine with torch's elastic agent, or join a launch that is already running.

The parent forwards signals to the ranks, reports the first error of a rank, and returns its exit code.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from converters.common.errors import TitanError
from titan_tools.installation import explain
from titan_tools.launched import PARENT_PID
from titan_tools.terminal.interrupts import Handler
from titan_tools.terminal.machine_errors import PIPE_CLOSED, as_machine_error, as_memory_error, reader_is_gone
from trainer.config.custom_import import error_of_import, where_to_look
from trainer.observability.status_line import is_possible
from trainer.ranks.machine import HOST_CPU, Device
from trainer.ranks.rendezvous import launched
from trainer.ranks.signals import die_with_parent, write_at_once

_STEP_DONE = "TITAN_STEP_DONE"  # names a file in which rank 0 says, from the first step on, what ending now loses
_AGENT_GRACE_SECS = 25  # a little less than the agent waits between SIGTERM and SIGKILL
_GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")  # NVIDIA; AMD; Windows' GPUs under WSL
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the agent names a file per rank for its error


class RankFailure(TitanError):
    """A rank failed; carries its message, kind and exit code."""

    def __init__(self, message: str, *, exit_code: int, hint: str = "", tries: Sequence[str] = (), kind: str = "rank"):
        super().__init__(message, hint=hint, tries=tries)
        self.exit_code = exit_code
        self.kind = kind


def inside_launch() -> bool:
    """True on a rank that torchrun, a scheduler or `run_ranks` started. Raises ConfigError for invalid variables."""
    return launched() is not None


def count_gpus() -> int:
    """Number of GPUs that torch can use on this machine; respects CUDA_VISIBLE_DEVICES."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if is_hidden or not any(path for pattern in _GPU_DEVICES for path in Path("/dev").glob(pattern)):
        return 0  # without importing torch, which takes seconds
    import torch

    return torch.cuda.device_count()


def gpu_name() -> str:
    """The name of this machine's first GPU, without a context on it, which would take its memory."""
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        for line in file.read_text().splitlines():
            if line.startswith("Model:"):
                return line.removeprefix("Model:").strip()
    return "GPUs"


def find_device() -> Device | None:
    """The device of ranks on this machine; None if torch is missing, without which GPUs cannot be counted."""
    try:
        if not count_gpus():
            return HOST_CPU
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    import torch

    return torch.device("cuda")


TITAN = ("-P", "-m", "titan_tools")  # -P: a `trainer` folder in the working directory must not shadow ours


def report_step_done(lost: str) -> None:
    """Tell `run_ranks` that the ranks take Ctrl-C as a request from now on, and what a second one would lose."""
    Path(os.environ[_STEP_DONE]).write_text(lost)


def run_ranks(
    argv: Sequence[str],
    *,
    nproc: int,
    program: Sequence[str] = TITAN,
    saves: bool = True,
    interrupt_answer: str = "",
) -> int:
    """Run `titan ARGV…` on `nproc` ranks and return its exit code; `program` are Python's arguments before ARGV.

    `saves`: on SIGTERM the ranks save and exit. Otherwise SIGTERM kills them and then has its previous effect here.
    `interrupt_answer`: printed at the first Ctrl-C after `report_step_done`, which is sent to the ranks; any other
    Ctrl-C kills them.
    Raises RankFailure with the message of the rank that failed first, and KeyboardInterrupt, with a note on what is
    lost, if Ctrl-C killed them.
    """
    with tempfile.TemporaryDirectory(prefix="titan-launch-") as folder, _explained_agent(), _note_on_loss(folder):
        agent = _build_agent((*program, *argv), nproc=nproc, folder=folder)
        with _forward_signals(agent, saves=saves, interrupt_answer=interrupt_answer):
            try:
                result = agent.run()
            finally:
                agent.get_worker_group().spec.rdzv_handler.shutdown()
    return _raise_first_failure(result.failures, saves=saves) if result.is_failed() else 0


@contextmanager
def _note_on_loss(folder: str) -> Iterator[None]:
    """Around the agent: a KeyboardInterrupt gets as a note what rank 0 last said in a file of `folder`."""
    step_done = Path(folder) / "step-done"
    os.environ[_STEP_DONE] = str(step_done)
    try:
        yield
    except KeyboardInterrupt as error:
        if step_done.exists() and (lost := step_done.read_text()):
            error.add_note(lost)
        raise


@contextmanager
def _explained_agent() -> Iterator[None]:
    """Around the agent, which meets itself at a free port of localhost. Raises RankFailure if it cannot."""
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        yield
    except (RendezvousError, dist.DistError, socket.gaierror) as error:
        raise RankFailure(
            f"ranks cannot be started: titan cannot connect to itself at localhost: {str(error).splitlines()[0]:.200}",
            exit_code=2,
            hint="localhost must resolve to this machine (/etc/hosts), and a process must be able to listen there",
        ) from error


def _build_agent(args: Sequence[str], *, nproc: int, folder: str) -> Any:
    import torch.distributed.elastic.rendezvous.registry as rdzv_registry
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    # The agent logs every rank that it stops; `_raise_first_failure` reports the cause once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    os.environ[PARENT_PID] = str(os.getpid())
    # with -P the working directory is not on the import path of the ranks: add the folder of this package
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
def _forward_signals(agent: Any, *, saves: bool, interrupt_answer: str) -> Iterator[None]:
    """Forward SIGTERM, SIGUSR1 and Ctrl-C to the ranks, which save and exit; a second SIGTERM or Ctrl-C kills them.

    So does the first if there is nothing to save. The agent's own handlers would give the ranks 30 seconds and
    lose their exit code.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    stop_requested = is_interrupted = killed = False
    step_done = Path(os.environ[_STEP_DONE])

    def to_ranks(number: int) -> None:
        for worker in agent.get_worker_group().workers:
            if isinstance(worker.id, int):  # it is a string until the rank is started
                try:
                    os.kill(worker.id, number)
                except ProcessLookupError:
                    continue

    def request_stop(number: int, frame: FrameType | None) -> None:
        nonlocal stop_requested
        if stop_requested and number == signal.SIGTERM:
            kill_ranks(number, frame)
        stop_requested = stop_requested or number == signal.SIGTERM
        to_ranks(number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted or not (interrupt_answer and step_done.exists()):
            kill_ranks(number, frame)
        is_interrupted = True
        write_at_once(interrupt_answer)
        to_ranks(number)

    def kill_ranks(number: int, frame: FrameType | None) -> None:
        nonlocal killed
        killed = True
        if is_possible():  # rank 0 cannot erase its line any more
            write_at_once("\r\033[2K", end="")
        to_ranks(signal.SIGKILL)
        raise KeyboardInterrupt

    def kill_and_reraise(number: int, frame: FrameType | None) -> None:
        to_ranks(signal.SIGKILL)
        signal.signal(number, before[number])
        signal.raise_signal(number)

    handlers: dict[int, Handler] = {
        signal.SIGTERM: request_stop,
        signal.SIGUSR1: request_stop,
        signal.SIGINT: interrupt,
    }
    if not saves:
        handlers = {signal.SIGTERM: kill_and_reraise, signal.SIGINT: kill_ranks}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    except Exception:
        if not killed:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if killed:  # even if Python ignored the exception of the handler, so that the agent only saw killed ranks
        raise KeyboardInterrupt


_WHY_ENDED = {
    signal.SIGKILL: "the kernel sends SIGKILL when memory runs out",
    signal.SIGABRT: "NCCL's watchdog sends SIGABRT to a rank whose collective timed out; its message is above, and the"
    " collectives of each rank are recorded in comm.save_traces_folder",
}


def _raise_first_failure(failures: dict[int, Any], *, saves: bool = True) -> int:
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
        raise RankFailure("stopped on request while starting: there was nothing to save yet", exit_code=75)
    return int(codes[0])


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
