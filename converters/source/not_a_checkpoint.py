"""The error for a folder that holds no checkpoint: what it is instead, and which path was probably meant."""

import re
from collections.abc import Collection, Sequence
from pathlib import PurePath

from converters.common.errors import CheckpointError, TitanError, UnsupportedError, list_offenders
from converters.common.names import DCP_METADATA, HF_CONFIG, META_SHARD, TORCH_INDEX, epoch_of, step_of
from converters.containers.dcp import DCP
from converters.containers.registry import has_state_marks
from converters.containers.safetensors import is_of_series, is_shard
from converters.containers.torch_folder import open_file
from converters.model.model_info import MODEL_FILES, describes_model
from converters.source.foreign_folders import foreign_folder
from converters.source.weight_files import ADAPTER, FOREIGN, HF_ENTRIES, merge_command
from converters.store.base import names_at, open_store, text_at
from converters.store.local_files import is_link, target_of
from converters.store.location import Location


def not_a_checkpoint(path: Location, names: Collection[str], torch_files: Sequence[str]) -> TitanError:
    """The error for a folder that is no checkpoint, with the path that was probably meant."""
    names, folders = {name.removesuffix("/") for name in names}, [name for name in sorted(names) if name.endswith("/")]
    steps = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    if steps:
        return _name_newest(path, [path / name for _, name in steps], called="a folder of checkpoints")
    inside = [step for folder in folders for step in _folders_in(path / folder) if step_of(step.name) is not None]
    if inside:
        return _name_newest(path, sorted(inside, key=lambda p: step_of(p.name) or 0), called="the folder of a run")
    if runs := [str(path / name) for name in folders if _is_run(path / name)]:
        return CheckpointError(f"{path}: a folder of runs, not a checkpoint", tries=runs[:8])
    epochs = sorted((epoch, name) for name in names if (epoch := epoch_of(name)) is not None)
    if epochs:
        return CheckpointError(
            f"{path}: a run of torchtune, not a checkpoint", tries=[str(path / name) for _, name in epochs[-2:]]
        )
    if any(map(DCP.is_data, names)):
        return CheckpointError(
            f"{path}: DCP data without {DCP_METADATA}",
            hint=f"the save was interrupted, or {DCP_METADATA} (a hidden file) was not copied",
        )
    if torch_files:
        return _of_several(path, torch_files)
    if inside := _checkpoints_inside(path):
        tries = [f"{folder}{_model_from(folder, path)}" for folder in inside]
        return CheckpointError(f"{path}: not a checkpoint, but holds some", tries=tries[-3:])
    if adapters := [path / folder for folder in folders if any(map(ADAPTER.fullmatch, names_at(path / folder)))]:
        newest = max(adapters, key=_numbers)
        return adapter_alone(newest, called=f"{path}: a run of PEFT, whose checkpoints are LoRA adapters, not models")
    if foreign := [name for name in sorted(names) if PurePath(name).suffix in FOREIGN]:
        kinds = ", ".join(sorted({FOREIGN[PurePath(name).suffix] for name in foreign}))
        return UnsupportedError(
            f"{path}: its weights are {kinds} files, which are not supported:{list_offenders(foreign)}",
            hint="load them with transformers and save them with save_pretrained, which writes safetensors",
        )
    expected = f"{DCP_METADATA}, *.safetensors, {META_SHARD.format(index=0)} or one .pt/.pth/.bin file"
    shown = ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "")
    return CheckpointError(f"{path}: not a checkpoint; it holds {shown}", hint=f"expected: {expected}")


def _of_several(path: Location, torch_files: Sequence[str]) -> TitanError:
    """The error for several torch files without an index: none is the checkpoint; those that open are suggested."""
    opened: list[str] = []
    problems: list[TitanError] = []
    for name in torch_files:
        try:
            if open_file(*open_store(path / name)).tensors:
                opened.append(name)
        except TitanError as error:
            problems.append(error)
    if problems and not opened:
        return problems[0]
    tries = [] if any(map(is_of_series, torch_files)) else [str(path / name) for name in opened[:2]]
    what = f"{path}: {len(torch_files)} torch files and no {TORCH_INDEX}:{list_offenders(torch_files)}"
    return UnsupportedError(what, hint="name the one that holds the weights", tries=tries)


def _folders_in(path: Location) -> list[Location]:
    """The folders in a folder, sorted, without links."""
    folders = [name.removesuffix("/") for name in names_at(path) if name.endswith("/")]
    root = open_store(path)[0].local() if folders else None
    return [path / name for name in folders if root and not is_link(root / name)]


def _checkpoints_inside(path: Location, *, depth: int = 3) -> list[Location]:
    """Folders below `path` that hold weights (Accelerate's pytorch_model_fsdp_0, the Trainer's checkpoint-500), oldest
    first; if LATEST (a link, or LATEST.txt) names a folder, those in it. Unfinished saves are left out.
    """
    checkpoints = []
    for folder in _folders_in(path):
        names = names_at(folder)
        if folder.name.startswith(("optim", ".")) or ".incomplete" in names:
            continue
        if has_state_marks(names) or any(name in HF_ENTRIES or is_shard(name) for name in names):
            checkpoints.append(folder)
        elif depth > 1:
            checkpoints += _checkpoints_inside(folder, depth=depth - 1)
    named = target_of(open_store(path)[0].local() / "LATEST") or text_at(path / "LATEST.txt").strip()
    newest = f"{path / PurePath(named).name}/"
    return [c for c in checkpoints if named and f"{c}/".startswith(newest)] or sorted(checkpoints, key=_numbers)


def _is_complete(names: Collection[str]) -> bool:
    """Whether a step has what is written last; torchtitan's last step may be a Hugging Face folder."""
    return has_state_marks(names) or not set(HF_ENTRIES).isdisjoint(names)


def _numbers(place: Location) -> list[int]:
    return [int(number) for name in (place.parent.name, place.name) for number in re.findall(r"\d+", name)]


def _model_from(place: Location, path: Location) -> str:
    """The option that names the folder between `place` and `path` with a config.json; a word if there is none.

    Nothing if a file in `place` describes the model.
    """
    store, _ = open_store(place)
    if describes_model(store.local(name for name in store.names() if name in MODEL_FILES)):
        return ""
    while place != path:
        place = place.parent
        if HF_CONFIG in names_at(place):
            return f" --model-from {place}"
    return " --model-from FOLDER"


def adapter_alone(folder: Location, *, called: str) -> UnsupportedError:
    """The error for a folder of an adapter without its model."""
    merged = folder.with_name(folder.name + "-merged")
    return UnsupportedError(
        called,
        hint="merge it into its base model with PEFT (pip install peft), which adapter_config.json names; PEFT "
        "refuses the version of torchao that titan uses, so this command hides it",
        tries=[merge_command(folder, merged)],
    )


def _is_run(path: Location) -> bool:
    """Whether a folder holds a folder of steps."""
    try:
        steps = (
            path / folder / name
            for folder in names_at(path)
            if folder.endswith("/")
            for name in names_at(path / folder)
        )
        return any(step_of(step.name) is not None and has_state_marks(names_at(step)) for step in steps)
    except OSError:
        return False


def _name_newest(path: Location, steps: list[Location], *, called: str) -> TitanError:
    """The error for a folder with `steps`, oldest first, below it; an interrupted save has no .metadata."""
    complete = [step for step in steps if _is_complete(names_at(step))]
    if not complete:
        foreign = (foreign_folder(step, names_at(step)) for step in reversed(steps))
        if error := next(filter(None, foreign), None):
            return error
    return CheckpointError(
        f"{path}: {called}, not a checkpoint",
        hint="its newest complete step was probably meant" if complete else "none of its steps is complete",
        tries=[str(step) for step in complete[-1:]],
    )
