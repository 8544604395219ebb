"""What a conversion will need: memory, disk, time. `--dry-run` tells it."""

from dataclasses import dataclass
from pathlib import Path

from converters.commit import require_space
from converters.formats.target import Target

# HF → DCP of a 1.2B bf16 Llama (2.47 GB; permutation, CRC32, digests), warm cache, 2 cores, fsync included: 2.1 s.
# A disk that writes slower than that sets the pace instead.
COPY_BYTES_PER_SEC = 1.2e9
START_SECS = 0.3
# Anonymous memory of the process, from above: the interpreter with numpy; a worker's buffers; one slot with its chunk,
# its place in the index and its line of the metadata. Measured for that Llama: 34 MiB with one worker, 62 with eight (a
# worker has more to hold where tensors are cut along columns); 285 MiB for one of 470,000 chunks.
BASE_BYTES = 40 * 1024**2
WORKER_BYTES = 16 * 1024**2
SLOT_BYTES = 600
SLOT_SECS = 1e-4  # 470,000 chunks of no size: 57 s


@dataclass(frozen=True, slots=True)
class Needs:
    """An estimate. `free_bytes` is what the disk of the destination has; `fits` says whether that is enough."""

    memory_bytes: int  # peak, anonymous
    disk_bytes: int
    free_bytes: int
    fits: bool
    secs: float  # at the rate below
    bytes_per_sec: float


def estimate_needs(dst: Path, target: Target, *, workers: int) -> Needs:
    """The needs of writing `target` to `dst` with `workers` threads."""
    disk_bytes, free_bytes = target.total_bytes, require_space(dst, 0)  # raises where nothing can be written at all
    return Needs(
        memory_bytes=BASE_BYTES + WORKER_BYTES * workers + SLOT_BYTES * len(target.slots),
        disk_bytes=disk_bytes,
        free_bytes=free_bytes,
        fits=free_bytes >= disk_bytes,
        secs=START_SECS + SLOT_SECS * len(target.slots) + target.total_bytes / COPY_BYTES_PER_SEC,
        bytes_per_sec=COPY_BYTES_PER_SEC,
    )
