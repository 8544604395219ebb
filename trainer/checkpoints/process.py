"""The process that writes a rank's asynchronous checkpoints: `python -m trainer.checkpoints.process …`.

It joins the other ranks' writers in a gloo group, maps the memory that its rank copies into, and writes the steps that
arrive through a pipe until the pipe is closed.
"""

import signal
import sys
import traceback
from dataclasses import dataclass, fields
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection

from trainer.ranks.signals import die_with_parent

PROGRAM = ["-m", "trainer.checkpoints.process"]


@dataclass(frozen=True, slots=True)
class WriterArguments:
    """Parent process, the store of the writers' group, modules, rank, and inherited file descriptors."""

    parent: int  # process id
    host: str
    modules: str  # that register stores, with commas in between
    port: int
    rank: int
    world_size: int
    pipe: int  # a file descriptor, as memory
    memory: int

    def words(self) -> list[str]:
        return [str(getattr(self, field.name)) for field in fields(self)]

    @classmethod
    def parse(cls, arguments: list[str]) -> "WriterArguments":
        parent, host, modules, *numbers = arguments
        return cls(int(parent), host, modules, *map(int, numbers))


def main(arguments: list[str]) -> None:
    args = WriterArguments.parse(arguments)
    die_with_parent(args.parent)
    # Schedulers and terminals signal all processes of a job; this one ends when training closes the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    serve(args, Connection(args.pipe))


def serve(args: WriterArguments, pipe: Connection) -> None:
    """Write each step that arrives; answer with None once it is committed, else with the error."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from converters.common.errors import TitanError
    from trainer.checkpoints.staging import SharedMemory, SnapshotPlanner
    from trainer.checkpoints.write import save_step
    from trainer.ranks.process_group import CHECKPOINT_TIMEOUT

    memory = SharedMemory(args.memory)
    group: dist.ProcessGroup | None = None
    while True:
        try:
            todo, snapshot = pipe.recv()
        except EOFError:
            return
        try:
            if group is None:
                for name in filter(None, args.modules.split(",") if todo.folder.scheme else ()):
                    import_module(name)
                store = TCPStore(args.host, args.port, is_master=False, timeout=timedelta(minutes=5))
                dist.init_process_group(
                    "gloo", store=store, timeout=CHECKPOINT_TIMEOUT, rank=args.rank, world_size=args.world_size
                )
                group = dist.group.WORLD
                assert group is not None
            save_step(todo, {}, group=group, planner=SnapshotPlanner(snapshot, memory.get(snapshot.num_bytes)))
            answer: TitanError | str | None = None
        except TitanError as error:
            answer = error
        except Exception as error:
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
