"""The error for a folder that holds no checkpoint: what it is instead, and which path was probably meant."""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from converters.common.errors import CheckpointError, TitanError, UnsupportedError, list_offenders
from converters.common.names import DCP_METADATA, HF_CONFIG, META_SHARD, TORCH_INDEX, epoch_of, step_of
from converters.containers.safetensors import is_of_series
from converters.containers.torch_folder import open_file
from converters.model.model_info import describes_model
from converters.source.foreign_folders import foreign_folder
from converters.source.weight_files import ADAPTER, FOREIGN, HF_ENTRIES, merge_command


def not_a_checkpoint(path: Path, names: Collection[str], torch_files: Sequence[str]) -> TitanError:
    """The error for a folder that is no checkpoint, with the path that was probably meant."""
    steps = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    if steps:
        return _name_newest(path, [path / name for _, name in steps], called="a folder of checkpoints")
    inside = [p for name in sorted(names) if (path / name).is_dir() for p in (path / name).iterdir()]
    inside = [p for p in inside if step_of(p.name) is not None and p.is_dir() and not p.is_symlink()]
    if inside:
        return _name_newest(path, sorted(inside, key=lambda p: step_of(p.name) or 0), called="the folder of a run")
    if runs := [str(path / name) for name in sorted(names) if _is_run(path / name)]:
        return CheckpointError(f"{path}: a folder of runs, not a checkpoint", tries=runs[:8])
    epochs = sorted((epoch, name) for name in names if (epoch := epoch_of(name)) is not None)
    if epochs:
        return CheckpointError(
            f"{path}: a run of torchtune, not a checkpoint", tries=[str(path / name) for _, name in epochs[-2:]]
        )
    if any(name.endswith(".distcp") for name in names):
        return CheckpointError(
            f"{path}: DCP data without {DCP_METADATA}",
            hint=f"the save was interrupted, or {DCP_METADATA} (a hidden file) was not copied",
        )
    if torch_files:
        return _of_several(path, torch_files)
    if inside := _checkpoints_inside(path):
        tries = [f"{folder}{'' if describes_model(folder) else _model_from(folder, path)}" for folder in inside]
        return CheckpointError(f"{path}: not a checkpoint, but holds some", tries=tries[-3:])
    if adapters := [adapter for adapter in path.glob("*/adapter_model.*") if ADAPTER.fullmatch(adapter.name)]:
        newest = max((adapter.parent for adapter in adapters), key=_numbers)
        return adapter_alone(newest, called=f"{path}: a run of PEFT, whose checkpoints are LoRA adapters, not models")
    if foreign := [name for name in sorted(names) if Path(name).suffix in FOREIGN]:
        kinds = ", ".join(sorted({FOREIGN[Path(name).suffix] for name in foreign}))
        return UnsupportedError(
            f"{path}: its weights are {kinds} files, which are not supported:{list_offenders(foreign)}",
            hint="load them with transformers and save them with save_pretrained, which writes safetensors",
        )
    expected = f"{DCP_METADATA}, *.safetensors, {META_SHARD.format(index=0)} or one .pt/.pth/.bin file"
    shown = ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "")
    return CheckpointError(f"{path}: not a checkpoint; it holds {shown}", hint=f"expected: {expected}")


def _of_several(path: Path, torch_files: Sequence[str]) -> TitanError:
    """The error for several torch files without an index: none is the checkpoint; those that open are suggested."""
    opened: list[str] = []
    problems: list[TitanError] = []
    for name in torch_files:
        try:
            if open_file(path / name).tensors:
                opened.append(name)
        except TitanError as error:
            problems.append(error)
    if problems and not opened:
        return problems[0]
    tries = [] if any(map(is_of_series, torch_files)) else [str(path / name) for name in opened[:2]]
    what = f"{path}: {len(torch_files)} torch files and no {TORCH_INDEX}:{list_offenders(torch_files)}"
    return UnsupportedError(what, hint="name the one that holds the weights", tries=tries)


def _checkpoints_inside(path: Path, *, depth: int = 3) -> list[Path]:
    """Folders below `path` that hold weights (Accelerate's pytorch_model_fsdp_0, the Trainer's checkpoint-500), oldest
    first; if LATEST (a link, or LATEST.txt) names a folder, those in it. Unfinished saves are left out.
    """
    checkpoints = []
    for folder in sorted(p for p in path.iterdir() if p.is_dir() and not p.is_symlink()):
        if folder.name.startswith(("optim", ".")) or (folder / ".incomplete").exists():
            continue
        marks = (*(folder / mark for mark in (DCP_METADATA, *HF_ENTRIES)), *folder.glob("shard-*-model-*.safetensors"))
        if any(mark.is_file() for mark in marks):
            checkpoints.append(folder)
        elif depth > 1:
            checkpoints += _checkpoints_inside(folder, depth=depth - 1)
    link, text = path / "LATEST", path / "LATEST.txt"
    named = os.readlink(link) if link.is_symlink() else text.read_text(errors="replace") if text.is_file() else ""
    newest = path / Path(named.strip()).name
    return [p for p in checkpoints if named and p.is_relative_to(newest)] or sorted(checkpoints, key=_numbers)


def _numbers(place: Path) -> list[int]:
    return [int(number) for name in (place.parent.name, place.name) for number in re.findall(r"\d+", name)]


def _model_from(place: Path, path: Path) -> str:
    """The option that names the folder between `place` and `path` with a config.json; a word if there is none."""
    folders = [folder for folder in place.parents if folder.is_relative_to(path) and (folder / HF_CONFIG).is_file()]
    return f" --model-from {folders[0] if folders else 'FOLDER'}"


def adapter_alone(folder: Path, *, called: str) -> UnsupportedError:
    """The error for a folder of an adapter without its model."""
    merged = folder.with_name(folder.name + "-merged")
    return UnsupportedError(
        called,
        hint="merge it into its base model with PEFT (pip install peft), which adapter_config.json names; PEFT "
        "refuses the version of torchao that titan uses, so this command hides it",
        tries=[merge_command(folder, merged)],
    )


def _is_run(path: Path) -> bool:
    """Whether a folder holds a folder of steps."""
    try:
        return any(step_of(p.parent.name) is not None for p in path.glob(f"*/*/{DCP_METADATA}"))
    except OSError:
        return False


def _name_newest(path: Path, steps: list[Path], *, called: str) -> TitanError:
    """The error for a folder with `steps`, oldest first, below it; an interrupted save has no .metadata."""
    marks = (DCP_METADATA, *HF_ENTRIES)  # torchtitan's last step may be a Hugging Face folder
    complete = [step for step in steps if any((step / mark).is_file() for mark in marks)]
    if not complete:
        foreign = (foreign_folder(step, {p.name for p in step.iterdir()}) for step in reversed(steps))
        if error := next(filter(None, foreign), None):
            return error
    return CheckpointError(
        f"{path}: {called}, not a checkpoint",
        hint="its newest complete step was probably meant" if complete else "none of its steps is complete",
        tries=[str(step) for step in complete[-1:]],
    )
