"""The sections of a training checkpoint: find its optimizer, describe its loader and RNG states."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.common.names import DATALOADER, OPTIMIZER, RNG
from converters.layout.mesh_shape import MeshShape
from converters.source.models_inside import IN_OPTIMIZER, ROOT, dict_around, find_owners, is_inside
from converters.views.catalog import Catalog

MODEL = "model"  # the section of the weights, which are at the root


@dataclass(frozen=True, slots=True)
class TrainingCheckpoint:
    """A training checkpoint whose optimizer is at `optimizer.`; `stored`: name here → name in the checkpoint."""

    catalog: Catalog
    stored: dict[str, str]  # only where they differ
    optimizers: tuple[str, ...]  # the places of the optimizers that became one

    def own_name(self, name: str) -> str:
        return self.stored.get(name, name)


def with_titan_sections(catalog: Catalog, *, drop: Collection[str] = ()) -> TrainingCheckpoint:
    """Rename `app.optim.state…` to `optimizer.state…`, and move the other entries of `app` up as well.

    Optimizers of a list or dict that have parts of the parameters each become one. Raises UnsupportedError if two
    have the same names, or of several models another than the selected one may have the optimizer, unless `drop` has
    its section.
    """
    names = catalog.names
    places = sorted({place for name in names if (place := _optimizer_place(name))})
    if catalog.selected is not None and OPTIMIZER not in drop:
        places = _of_selected(catalog, places, catalog.selected, drop=drop)
    if not places or places == [OPTIMIZER]:
        return TrainingCheckpoint(catalog, {}, tuple(places))
    new = {name: _moved(name, places) for name in names}
    if len(places) > 1 and OPTIMIZER in drop:  # in any form
        new |= {n: f"{OPTIMIZER}.{n}" for n in names if any(is_inside(n, place) for place in places)}
    if len(set(new.values())) < len(new):
        if len(places) > 1:
            raise UnsupportedError(
                f"{catalog.root} holds several optimizers with the same names:{list_offenders(places)}",
                tries=[f"--drop {OPTIMIZER}"],
            )
        taken = sorted(name for name, moved in new.items() if list(new.values()).count(moved) > 1)
        raise CheckpointError(f"{catalog.root}: names of titan's sections are already in use:{list_offenders(taken)}")
    moved = replace(
        catalog,
        tensors={new[n]: replace(t, fqn=new[n]) for n, t in catalog.tensors.items()},
        values={new[n]: value for n, value in catalog.values.items()},
        planner_data={new[n]: _moved_path(catalog.path_of(n), new[n]) for n in names},
        stored={new[n]: stored_name for n, stored_name in catalog.stored.items() if n in new},
        selected=catalog.selected and _moved(catalog.selected, places),
        other_models=tuple(_moved(place, places) for place in catalog.other_models),
    )
    return TrainingCheckpoint(moved, {moved: name for name, moved in new.items() if moved != name}, tuple(places))


def find_sections(catalog: Catalog, weights: Iterable[str]) -> dict[str, str]:
    """Entry → section: `model` for `weights`, else a section of titan's, or else the first key."""
    weights = set(weights)
    return {name: MODEL if name in weights else catalog.section_of(name) for name in catalog.names}


def _optimizer_place(name: str) -> str:
    """The keys of the optimizer that an entry is in, joined by dots; "" if it is in none.

    They end in front of `state` or `param_groups`: `optim`, `app.optimizers`, `state.optimizers.AdamW`, `optimizers.0`.
    """
    keys = name.split(".")
    first = next((depth for depth, key in enumerate(keys) if IN_OPTIMIZER.match(key)), len(keys))
    for depth in range(first + 1, len(keys)):
        if keys[depth] in ("state", "param_groups"):
            return ".".join(keys[:depth])
    return ""


def _of_selected(catalog: Catalog, places: Sequence[str], selected: str, *, drop: Collection[str]) -> list[str]:
    """The optimizers of the selected model. Raises UnsupportedError if another could be taken for one of them.

    One in another model's own dict stays there; elsewhere, a later reader of the output would give it to the model that
    is at the root then.
    """
    models = (selected, *catalog.other_models)
    owners = {place: find_owners(place, models) for place in places}
    taken = [place for place, found in owners.items() if found == [selected]]
    unclear: dict[str, str] = {}
    for place in owners.keys() - taken:
        around, section = dict_around(place, models), place.partition(".")[0]
        is_apart = around not in ("", selected) and not is_inside(selected, around)
        if not is_apart and section not in drop:
            unclear[place] = f"{place}: of {' or '.join(model or ROOT for model in owners[place])}"
    if unclear:
        sections = dict.fromkeys(place.partition(".")[0] if taken else OPTIMIZER for place in sorted(unclear))
        raise UnsupportedError(
            f"{catalog.root}: not the optimizer of {selected or ROOT}, or not of it alone:"
            + list_offenders(sorted(unclear.values())),
            hint="the moments of one model must not be continued with the weights of another",
            tries=[f"--drop {','.join(sections)}"],
        )
    return taken


def _moved(name: str, places: Iterable[str]) -> str:
    """The name of an entry once the optimizers are at `optimizer`, and what is beside them is at the root."""
    for place in places:
        if is_inside(name, place):
            return OPTIMIZER + name.removeprefix(place)
        keys = place.split(".")
        outer = keys[: next(depth for depth, key in enumerate(keys) if IN_OPTIMIZER.match(key))]
        if outer and name.startswith(text := ".".join((*outer, ""))):
            name = name.removeprefix(text)
            break
    return name


def _moved_path(path: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """The keys of an entry that is now called `name`: the last ones of `path`, under a new first one."""
    for depth in range(len(path)):
        rest = path[depth:]
        text = ".".join(map(str, rest))
        if text == name:
            return rest
        if f"{OPTIMIZER}.{text}" == name:
            return (OPTIMIZER, *rest)
    return (name,)


_TITAN_KEYS = {"version", "fingerprint", "seed", "consumed_samples"}  # trainer/data/loader.py's; a test compares them
_STREAM_KEYS = {"version", "fingerprint", "seed", "positions"}  # trainer/data/stream_loader.py's; likewise
_PER_RANK = f"{DATALOADER}.dp_rank_"  # torchtitan's


def describe_loader_state(names: Collection[str], mesh: MeshShape | None) -> str:
    """The kind of a checkpoint's loader state, and whether it fits `mesh`; "" if there is none.

    Raises UnsupportedError if it is invalid on `mesh`.
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
    """What happens to the ranks' random number states; "" if there are none."""
    num_ranks = sum(name.startswith(f"{RNG}.cpu.") for name in names)
    if not num_ranks:
        return ""
    if mesh is None or mesh.world_size == num_ranks:
        return f"{RNG}: states of {num_ranks} ranks kept; a run with another number of ranks uses new seeds"
    return f"{RNG}: states of {num_ranks} ranks kept; a run on {mesh} has {mesh.world_size} and uses new seeds"
