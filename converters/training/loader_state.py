"""What becomes of states that count ranks: data loaders and random number generators."""

from collections.abc import Collection

from converters.errors import UnsupportedError
from converters.layout import MeshShape
from converters.names import DATALOADER, RNG

_TITAN_KEYS = {"version", "fingerprint", "seed", "consumed_samples"}  # trainer/data/loader.py's; a test compares
_STREAM_KEYS = {"version", "fingerprint", "seed", "positions"}  # trainer/data/stream_loader.py's; so it does of these
_PER_RANK = f"{DATALOADER}.dp_rank_"  # torchtitan's


def tell_loader_state(names: Collection[str], mesh: MeshShape | None) -> str:
    """What kind of loader state a checkpoint holds and what becomes of it; "" where it holds none.

    Raises UnsupportedError where it means nothing on `mesh`.
    """
    keys = {name.removeprefix(f"{DATALOADER}.") for name in names if name.startswith(f"{DATALOADER}.")}
    if not keys:
        return ""
    num_ranks = sum(name.startswith(_PER_RANK) for name in names)
    if num_ranks:
        if mesh is not None and mesh.batch != num_ranks:
            raise UnsupportedError(
                f"the data loader's state is that of {num_ranks} data-parallel ranks, one each, and {mesh} has "
                f"{mesh.batch}: it cannot be shared out anew",
                hint="without it the run begins its data again; titan's own loader state would fit any mesh",
                tries=[f"--drop {DATALOADER}"],
            )
        return (
            f"{DATALOADER}: torchtitan's, a state for each of {num_ranks} data-parallel ranks; kept as bytes. It fits "
            f"torchtitan at the same dp degree; `titan train` needs --checkpoint.exclude_from_loading {DATALOADER}"
        )
    if keys == _TITAN_KEYS:
        return f"{DATALOADER}: titan's; kept, it means the same for any mesh"
    if keys == _STREAM_KEYS:
        return f"{DATALOADER}: titan's, of streams; kept, it fits any mesh whose data-parallel degree divides them"
    return f"{DATALOADER}: of a kind that is not known here; kept as bytes, whether or not it fits another mesh"


def tell_rng_state(names: Collection[str], mesh: MeshShape | None) -> str:
    """What becomes of the ranks' random number states; "" where there are none."""
    num_ranks = sum(name.startswith(f"{RNG}.cpu.") for name in names)
    if not num_ranks:
        return ""
    if mesh is None or mesh.world_size == num_ranks:
        return f"{RNG}: states of {num_ranks} ranks kept; a run with another number seeds anew"
    return f"{RNG}: states of {num_ranks} ranks kept; a run on {mesh} has {mesh.world_size} and seeds anew"
