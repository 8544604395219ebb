"""The sections of a training checkpoint: find its optimizer, describe its loader and RNG states."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from converters.catalog import Catalog
from converters.errors import CheckpointError, UnsupportedError, list_offenders
from converters.mesh_shape import MeshShape
from converters.names import DATALOADER, OPTIMIZER, RNG

MODEL = "model"  # the section of the weights, which are at the root
# torchtitan and most scripts; torch's tutorials; dicts that were made for torch.save
_OPTIMIZER_KEYS = (OPTIMIZER, "optim", "optimizer_state_dict", "optimizer_state")


@dataclass(frozen=True, slots=True)
class TrainingCheckpoint:
    """A training checkpoint whose optimizer is at `optimizer.`; `stored`: name here → name in the checkpoint."""

    catalog: Catalog
    stored: dict[str, str]  # only where they differ

    def own_name(self, name: str) -> str:
        return self.stored.get(name, name)


def with_titan_sections(catalog: Catalog) -> TrainingCheckpoint:
    """Rename `app.optim.state…` to `optimizer.state…`, and move the other entries of `app` up as well."""
    names = [*catalog.tensors, *catalog.blobs]
    places = {place for name in names if (place := _optimizer_place(catalog.path_of(name)))}
    if len(places) > 1:
        found = [".".join(map(str, place)) for place in sorted(places, key=str)]
        raise UnsupportedError(f"{catalog.root} holds several optimizers:{list_offenders(found)}")
    place = next(iter(places), (OPTIMIZER,))
    if place == (OPTIMIZER,):
        return TrainingCheckpoint(catalog, {})
    paths = {name: _moved(catalog.path_of(name), place) for name in names}
    new = {name: ".".join(map(str, path)) for name, path in paths.items()}
    if len(set(new.values())) < len(new):
        taken = sorted(name for name, moved in new.items() if list(new.values()).count(moved) > 1)
        raise CheckpointError(f"{catalog.root}: names of titan's sections are already in use:{list_offenders(taken)}")
    moved = replace(
        catalog,
        tensors={new[n]: replace(t, fqn=new[n]) for n, t in catalog.tensors.items()},
        blobs={new[n]: replace(b, fqn=new[n]) for n, b in catalog.blobs.items()},
        planner_data={new[n]: path for n, path in paths.items()},
        stored={new[n]: own for n, own in catalog.stored.items() if n in new},
    )
    return TrainingCheckpoint(moved, {moved: name for name, moved in new.items() if moved != name})


def find_sections(catalog: Catalog, weights: Iterable[str]) -> dict[str, str]:
    """Entry → section: `model` for `weights`, else a section of titan's, or else the first key."""
    weights = set(weights)
    names = (*catalog.tensors, *catalog.blobs)
    return {name: MODEL if name in weights else catalog.section_of(name) for name in names}


def _optimizer_place(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The keys of the optimizer that `path` is in; () if it is in none."""
    for depth, key in enumerate(path[:-1]):
        inner = str(path[depth + 1])
        if key in _OPTIMIZER_KEYS and inner.split(".")[0] in ("state", "param_groups"):
            return path[: depth + 1]
    return ()


def _moved(path: tuple[Any, ...], place: tuple[Any, ...]) -> tuple[Any, ...]:
    outer = len(place) - 1
    if path[:outer] != place[:outer]:
        return path
    path = path[outer:]
    return (OPTIMIZER, *path[1:]) if path[:1] == place[-1:] else path


_TITAN_KEYS = {"version", "fingerprint", "seed", "consumed_samples"}  # trainer/data/loader.py's; a test compares them
_STREAM_KEYS = {"version", "fingerprint", "seed", "positions"}  # trainer/data/stream_loader.py's; likewise
_PER_RANK = f"{DATALOADER}.dp_rank_"  # torchtitan's


def describe_loader_state(names: Collection[str], mesh: MeshShape | None) -> str:
    """The kind of a checkpoint's loader state, and whether it fits `mesh`; "" where there is none.

    Raises UnsupportedError where it is invalid on `mesh`.
    """
    keys = {name.removeprefix(f"{DATALOADER}.") for name in names if name.startswith(f"{DATALOADER}.")}
    if not keys:
        return ""
    num_ranks = sum(name.startswith(_PER_RANK) for name in names)
    if num_ranks:
        if mesh is not None and mesh.batch != num_ranks:
            raise UnsupportedError(
                f"the data loader's state is that of {num_ranks} data-parallel ranks, one each, and {mesh} has "
                f"{mesh.batch}: it cannot be redistributed",
                hint="without it the run restarts its data; titan's own loader state fits any mesh",
                tries=[f"--drop {DATALOADER}"],
            )
        return (
            f"{DATALOADER}: torchtitan's, a state for each of {num_ranks} data-parallel ranks; kept as bytes. It fits "
            f"torchtitan at the same dp degree; `titan train` needs --checkpoint.exclude_from_loading {DATALOADER}"
        )
    if keys == _TITAN_KEYS:
        return f"{DATALOADER}: titan's; kept, it fits any mesh"
    if keys == _STREAM_KEYS:
        return f"{DATALOADER}: titan's, of streams; kept, it fits any mesh whose data-parallel degree divides them"
    return f"{DATALOADER}: of an unknown kind; kept as bytes, although it may not fit another mesh"


def describe_rng_state(names: Collection[str], mesh: MeshShape | None) -> str:
    """What happens to the ranks' random number states; "" where there are none."""
    num_ranks = sum(name.startswith(f"{RNG}.cpu.") for name in names)
    if not num_ranks:
        return ""
    if mesh is None or mesh.world_size == num_ranks:
        return f"{RNG}: states of {num_ranks} ranks kept; a run with another number of ranks uses new seeds"
    return f"{RNG}: states of {num_ranks} ranks kept; a run on {mesh} has {mesh.world_size} and uses new seeds"
