"""The process that writes checkpoints, on a slow or a failing disk: `python -P slow_saver.py HOW …`, HOW as `Slow`."""

import os
import sys
import time

from converters.store.folder_output import FolderOutput
from converters.store.output import SummedFile
from trainer.checkpoints import io as checkpoint_io
from trainer.checkpoints import process as checkpoint_process


class Slow:
    """Patches, by name; each is what a disk does to the writer."""

    @staticmethod
    def slow(secs: float = 1.0) -> None:
        """Every data file takes its time before the first byte is read from memory."""
        write_data = checkpoint_io.CheckpointWriter.write_data

        def later(self, plan, planner):
            time.sleep(secs)
            return write_data(self, plan, planner)

        checkpoint_io.CheckpointWriter.write_data = later

    @staticmethod
    def full(on_rank: int = 1) -> None:
        """No space is left, for one rank alone."""
        write = SummedFile.write

        def fail(self, data):
            if self.name.startswith(f"__{on_rank}_"):
                raise OSError(28, "No space left on device")
            write(self, data)

        SummedFile.write = fail

    @staticmethod
    def full_after_a_while() -> None:
        """The same, found out when the next step has begun."""
        Slow.full()
        Slow.slow(1.0)

    @staticmethod
    def stuck_in_commit() -> None:
        """The last moment before the second save's rename never ends."""
        commit = FolderOutput.commit

        def stay(*args, **kwargs):
            FolderOutput.commit = lambda *args, **kwargs: time.sleep(1000)
            commit(*args, **kwargs)

        FolderOutput.commit = stay

    @staticmethod
    def stuck_in_data() -> None:
        """The second save's first tensor is written, and the next never is."""
        write_tensor, num_saves = checkpoint_io.CheckpointWriter._write_tensor, {}

        def stay(self, file, item, planner):
            num_saves.setdefault(id(self._sources), len(num_saves))
            if len(num_saves) > 1 and file.size:
                time.sleep(1000)
            return write_tensor(self, file, item, planner)

        checkpoint_io.CheckpointWriter._write_tensor = stay

    @staticmethod
    def killed() -> None:
        """The kernel takes the process of the last rank away while it writes."""

        def die(self, plan, planner):
            if self._rank == 1:
                os.kill(os.getpid(), 9)
            return write_data(self, plan, planner)

        write_data = checkpoint_io.CheckpointWriter.write_data
        checkpoint_io.CheckpointWriter.write_data = die


if __name__ == "__main__":
    getattr(Slow, sys.argv[1])()
    checkpoint_process.main(sys.argv[2:])
