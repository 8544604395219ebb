"""Checkpoints that a run cannot resume or start from, as far as their small files say. Torch-free."""

from collections.abc import Collection

from converters.common.errors import CheckpointError
from converters.common.names import DATALOADER, OPTIMIZER, RNG, SECTIONS, section_of
from converters.containers.dcp import DCP
from converters.containers.registry import CONTAINERS
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo, describes_model, read_model_info
from converters.source.open import open_checkpoint
from converters.source.weights import naming_of, open_native
from converters.store.base import open_store
from converters.store.location import Location
from converters.store.manifest import check_files, check_sizes
from converters.views.catalog import Catalog
from trainer.config.sections import Config
from trainer.job.chosen_model import refuse_other_model, selected_by_setting

_RANKS_LOADER = f"{DATALOADER}.dp_rank_"  # torchtitan's, a pickle for each data-parallel rank


def has_intact_small_files(place: Location) -> bool:
    """Whether a step's files but those of tensors have the CRC32s of its manifest. Loading reports a step that has not,
    and takes the one before.
    """
    store, _ = open_store(place)
    manifest = check_sizes(store)
    small = [] if manifest is None else [name for name in manifest.files if not DCP.is_data(name)]
    return manifest is not None and not check_files(store, small, manifest=manifest)


def refuse_unfit_step(place: Location, info: ModelInfo, config: Config) -> None:
    """Raise CheckpointError if a step has another model or other dtypes than the config, or lacks a section."""
    catalog, excluded = open_checkpoint(place), config.checkpoint.exclude_from_loading
    refuse_not_resumable(catalog, info=info, excluded=excluded)
    if describes_model(catalog.root):
        refuse_other_model(read_model_info(catalog.root, catalog), info, place)
    _refuse_other_dtypes(catalog, info, config)


def _refuse_other_dtypes(catalog: Catalog, info: ModelInfo, config: Config) -> None:
    """Raise CheckpointError if no weight, or no moment, has the dtype that the run keeps it in."""
    path = catalog.place
    trained = [p.fqn for p in get_family(info.family).parameters(info.args) if p.is_trained]
    moments = [f"{OPTIMIZER}.state.{fqn}.exp_avg" for fqn in trained]
    state_dtype = config.optimizer.state_dtype or config.training.dtype
    wanted = {"training.dtype": (trained, config.training.dtype), "optimizer.state_dtype": (moments, state_dtype)}
    for key, (names, dtype) in wanted.items():
        saved = sorted({catalog.tensors[name].dtype for name in names if name in catalog.tensors})
        if (
            saved
            and dtype not in saved
            and not (names is moments and OPTIMIZER in config.checkpoint.exclude_from_loading)
        ):
            what = "moments" if names is moments else "weights"
            raise CheckpointError(
                f"{path} has {what} in {', '.join(saved)}, and the run keeps them in {dtype}",
                hint="a resumed run does not cast its state",
                tries=[f"--{key} {saved[0]}", f"--job.dump_folder NEW_FOLDER --checkpoint.initial_load_path {path}"],
            )


def refuse_other_weights(place: Location, *, info: ModelInfo, select: str | None) -> None:
    """Raise CheckpointError if the weights of a checkpoint are those of another model."""
    with selected_by_setting(), open_native(place, select=select, otherwise=info) as weights:
        refuse_other_model(weights.info, info, place)


def refuse_not_resumable(catalog: Catalog, *, info: ModelInfo, excluded: Collection[str]) -> None:
    """Raise CheckpointError if this kind of checkpoint cannot provide a section that is not excluded."""
    path = catalog.place
    if not CONTAINERS[catalog.container].keeps_state:
        raise CheckpointError(
            f"{path} holds only weights ({catalog.container}); initial_load_model_only = false needs the whole state",
            tries=["--checkpoint.initial_load_model_only"],
        )
    naming = naming_of(catalog, get_family(info.family))
    selected = f" --select {catalog.selected}" if catalog.selected else ""
    if any(rule.foreign != rule.native for rule in naming.rules):
        raise CheckpointError(
            f"{path} has {naming.name} names for weights and optimizer; a run resumes from native names",
            tries=[
                f"titan reshard {path} NATIVE_CHECKPOINT{selected}, which renames both",
                "--checkpoint.initial_load_model_only",
            ],
        )
    needed_sections = [section for section in SECTIONS if section not in excluded and section != RNG]
    if needed_sections and not catalog.values and all(section_of(fqn) == "model" for fqn in catalog.tensors):
        raise CheckpointError(
            f"{path} holds only weights, so a run cannot resume from it: no {', '.join(needed_sections)}",
            hint="checkpoint.last_save_model_only = true saves the last step so; a finished run cannot resume",
            tries=[
                "--checkpoint.load_step EARLIER, to resume from an earlier step",
                f"--job.dump_folder NEW_FOLDER --checkpoint.initial_load_path {path}, to start a run with its weights",
            ],
        )
    num_ranks = sum(name.startswith(_RANKS_LOADER) for name in catalog.values)
    if num_ranks and DATALOADER not in excluded:
        raise CheckpointError(
            f"{path} has torchtitan's data position: a pickle for each of {num_ranks} data-parallel ranks, which titan "
            "does not execute, and which does not apply to titan's data",
            hint="everything else can be resumed; the data then starts from the beginning",
            tries=[f"--checkpoint.exclude_from_loading {','.join((*excluded, DATALOADER))}"],
        )
