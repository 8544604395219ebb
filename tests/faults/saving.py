"""Kills in the phases of a save, for tests: what to patch in a rank that is forked. The product has no hooks."""

import os
import shutil
import signal
import time
from pathlib import Path

# In the order they come. What rank 0 does alone is a phase of the others too: they wait then.
PHASES = (
    "planning",
    "half of the data",
    "data, no metadata",
    "metadata, no manifest",
    "manifest, no rename",
    "renamed, not reported",
    "committed, before the purge",
    "in the purge",
)


def is_committed(phase: str, victim: int) -> bool:
    """Whether the step is there after the kill. (Rank 0 renames alone, also when another has died meanwhile.)"""
    first = PHASES.index("renamed, not reported" if victim == 0 else "manifest, no rename")
    return PHASES.index(phase) >= first


def kill_in(phase: str, victim: int, folder: Path, nth: int, rank: int) -> None:
    """Kill rank `victim` in a phase of the nth save; `rank` is this one. Files in `folder` tell ranks' process ids."""
    (folder / f"rank_{rank}.pid").write_text(str(os.getpid()))
    from converters.store import folder_output
    from converters.store.folder_output import FolderOutput
    from trainer.checkpoints import io as checkpoint_io
    from trainer.checkpoints import write as checkpoint_write

    Writer = checkpoint_io.CheckpointWriter
    num_saves = 0
    writer_init = Writer.__init__

    def count(self, *args, **keys):
        nonlocal num_saves
        num_saves += 1
        writer_init(self, *args, **keys)

    Writer.__init__ = count

    def is_due() -> bool:
        return num_saves == nth

    def before(owner, name, happen):
        original = getattr(owner, name)

        def wrapped(*args, **keys):
            if is_due():
                happen(*args)
            return original(*args, **keys)

        setattr(owner, name, wrapped)

    def here(*_):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def there(*_):  # in what rank 0 does alone
        _kill(int((folder / f"rank_{victim}.pid").read_text()))

    match phase:
        case "planning":
            before(Writer, "prepare_local_plan", here)
        case "half of the data":
            before(Writer, "_write_tensor", lambda _, file, *rest: here() if file.size > 1_000_000 else None)
        case "data, no metadata":
            before(Writer, "finish", there)
        case "metadata, no manifest":
            before(checkpoint_write, "_digest", here)
        case "manifest, no rename":
            before(FolderOutput, "commit", there)
        case "renamed, not reported":
            commit = FolderOutput.commit

            def commit_and_die(*args, **keys):
                commit(*args, **keys)
                if is_due():
                    there()

            FolderOutput.commit = commit_and_die
        case "committed, before the purge":
            before(checkpoint_write, "retire", there)
        case "in the purge":

            def cut_off(path, **keys):
                if data := next(Path(path).glob("*.distcp"), None):
                    data.unlink()
                    there()
                shutil.rmtree(path, **keys)

            folder_output.shutil = type("Shutil", (), {"rmtree": staticmethod(cut_off)})


def _kill(process_id: int) -> None:
    """Kill a process, oneself maybe, and wait until it is dead: a zombie, or gone."""
    os.kill(process_id, signal.SIGKILL)
    while True:
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.005)
