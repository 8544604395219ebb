"""Start the ranks of a node with torch's elastic agent.

The parent forwards signals to the ranks, reports the first error of a rank, and returns its exit code.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from titan_tools.launch.failures import RankFailure, raise_first_failure, stopped_while_starting
from titan_tools.launch.launch import Launch
from titan_tools.launch.launched import PARENT_PID, STEP_DONE
from titan_tools.terminal.interrupts import Handler
from trainer.observability.status_line import is_possible
from trainer.ranks.rendezvous import LostRank
from trainer.ranks.signals import write_at_once


def run_ranks(launch: Launch, *, saves: bool = True, interrupt_answer: str = "") -> int:
    """Run the ranks of this node and return their exit code.

    `saves`: on SIGTERM the ranks save and exit. Otherwise SIGTERM kills them and then has its previous effect here.
    `interrupt_answer`: printed at the first Ctrl-C after `report_step_done`, which is sent to the ranks; any other
    Ctrl-C kills them.
    Raises RankFailure with the message of the rank that failed first, LostRank or ConfigError if the nodes do not come
    together, and KeyboardInterrupt, with a note on what is lost, if Ctrl-C killed the ranks.
    """
    with tempfile.TemporaryDirectory(prefix="titan-launch-") as folder, _explained_agent(launch), _note_on_loss(folder):
        agent = _build_agent(launch, folder=folder)
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
def _explained_agent(launch: Launch) -> Iterator[None]:
    """Around the agent: a failed connection raises LostRank between nodes, and RankFailure on one machine.

    There the agent meets itself at a free port of localhost.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        yield
    except (RendezvousError, dist.DistError, socket.gaierror) as error:
        reason = f"{str(error).splitlines()[0]:.200}"
        if launch.rendezvous:
            raise LostRank(
                f"this node has lost the one that hosts --rdzv-endpoint {launch.rendezvous}: {reason}",
                hint="it has ended, or cannot be reached any more; its own output says more",
            ) from error
        raise RankFailure(
            f"ranks cannot be started: titan cannot connect to itself at localhost: {reason}",
            exit_code=2,
            hint="localhost must resolve to this machine (/etc/hosts), and a process must be able to listen there",
        ) from error


def _build_agent(launch: Launch, *, folder: str) -> Any:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    # The agent logs every rank that it stops; `raise_first_failure` reports the cause once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ |= {**launch.environment, PARENT_PID: str(os.getpid())}
    if launch.rendezvous is None:
        handler = _rendezvous_of_one()
    else:
        from titan_tools.launch.nodes import join_nodes

        handler = join_nodes(launch)
    spec = WorkerSpec(
        role="titan",
        local_world_size=launch.nproc,
        entrypoint=sys.executable,
        args=(*launch.program, *launch.command),
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=0.1,
    )
    return LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=folder))


def _rendezvous_of_one() -> Any:
    """The rendezvous of an agent with itself: all ranks are on this machine."""
    import torch.distributed.elastic.rendezvous.registry as rdzv_registry
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    return rdzv_registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
    )


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
        if agent.get_worker_group().group_rank is None:  # it waits for other nodes
            raise stopped_while_starting()
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
