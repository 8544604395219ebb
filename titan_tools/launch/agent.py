"""Start N ranks on this machine with torch's elastic agent.

The parent forwards signals to the ranks, reports the first error of a rank, and returns its exit code.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from titan_tools.launch.failures import RankFailure, raise_first_failure
from titan_tools.launch.launched import PARENT_PID, STEP_DONE
from titan_tools.terminal.interrupts import Handler
from trainer.observability.status_line import is_possible
from trainer.ranks.signals import write_at_once

TITAN = ("-P", "-m", "titan_tools")  # -P: a `trainer` folder in the working directory must not shadow ours


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
    return raise_first_failure(result.failures, saves=saves) if result.is_failed() else 0


@contextmanager
def _note_on_loss(folder: str) -> Iterator[None]:
    """Around the agent: a KeyboardInterrupt gets as a note what rank 0 last said in a file of `folder`."""
    step_done = Path(folder) / "step-done"
    os.environ[STEP_DONE] = str(step_done)
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

    # The agent logs every rank that it stops; `raise_first_failure` reports the cause once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    os.environ[PARENT_PID] = str(os.getpid())
    # with -P the working directory is not on the import path of the ranks: add the folder of this package
    home = str(Path(__file__).resolve().parents[2])
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
    step_done = Path(os.environ[STEP_DONE])

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
