"""The process that writes a rank's checkpoints beside its training: `python -m trainer.checkpoints.process …`.

It meets those of the other ranks in a gloo group, maps the memory that its rank copies into, and writes what it is told
through a pipe until that is closed.
"""

import signal
import sys
import traceback
from dataclasses import dataclass, fields
from datetime import timedelta
from multiprocessing.connection import Connection

from trainer.signals import die_with_parent

PROGRAM = ["-m", "trainer.checkpoints.process"]


@dataclass(frozen=True, slots=True)
class Place:
    """A process's part: whose it is, where it meets those of the other ranks, and what it was handed open."""

    parent: int  # process id
    host: str
    port: int
    rank: int
    world_size: int
    pipe: int  # descriptors
    memory: int

    def arguments(self) -> list[str]:
        return [str(getattr(self, field.name)) for field in fields(self)]

    @classmethod
    def parse(cls, arguments: list[str]) -> "Place":
        return cls(*(field.type(text) for field, text in zip(fields(cls), arguments, strict=True)))


def main(arguments: list[str]) -> None:
    place = Place.parse(arguments)
    die_with_parent(place.parent)
    # Schedulers and terminals signal all processes of a job: the training decides, and this one ends with it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    serve(place, Connection(place.pipe))


def serve(place: Place, pipe: Connection) -> None:
    """Answer each order with None once the step is committed, else with what went wrong."""
    import torch.distributed as dist

    from converters.errors import TitanError
    from trainer.checkpoints.staging import SharedMemory, SnapshotPlanner
    from trainer.checkpoints.write import save_step
    from trainer.process_group import CHECKPOINT_TIMEOUT

    memory = SharedMemory(place.memory)
    group = None
    while True:
        try:
            todo, snapshot = pipe.recv()
        except EOFError:
            return
        try:
            if group is None:
                store = dist.TCPStore(place.host, place.port, is_master=False, timeout=timedelta(minutes=5))
                ours = {"rank": place.rank, "world_size": place.world_size}
                dist.init_process_group("gloo", store=store, timeout=CHECKPOINT_TIMEOUT, **ours)
                group = dist.group.WORLD
            save_step(todo, {}, group=group, planner=SnapshotPlanner(snapshot, memory.get(snapshot.num_bytes)))
            answer = None
        except TitanError as error:
            answer = error
        except Exception as error:
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
