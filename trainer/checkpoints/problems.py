"""Contradictory checkpoint settings, and the checkpoint that a run starts from. Torch-free."""

import os

from converters.model.model_info import ModelInfo
from converters.store.hub_names import find_local
from converters.store.location import Location, Place, locate
from trainer.config.sections import Checkpoint, Config, Model

_EXPORTS = ("last_save_in_hf", "last_save_in_torchtune")


def is_saving(settings: Checkpoint) -> bool:
    return settings.enable and not settings.load_only


def checkpoint_folder(config: Config) -> Location:
    """The folder of a run's checkpoints: a URI, or a path, which is below job.dump_folder unless it is absolute."""
    return locate(config.job.dump_folder) / config.checkpoint.folder


def initial_path(settings: Checkpoint, model: Model) -> Location | None:
    """The checkpoint that a run without one of its own starts from; None means initial weights from the seed.

    Raises CheckpointError for a model's name that the hub's cache does not have.
    """
    if settings.initial_load_path:
        return find_local(settings.initial_load_path)
    return find_local(model.hf_assets_path) if settings.initial_load_in_hf else None


def bytes_of_state(num_parameters: int, width: int) -> int:
    """Approximate size of a checkpoint: the weights and their two moments, of `width` bytes a value."""
    return 3 * width * num_parameters


def checkpoint_problems(settings: Checkpoint, model: Model) -> list[str]:
    """Checkpoint settings that contradict each other, each with settings that work."""
    exports = [f"checkpoint.{key}" for key in _EXPORTS if getattr(settings, key)]
    problems = [
        f"{key} converts the last step's checkpoint, and none is saved: set checkpoint.enable, and load_only to false"
        for key in exports
        if not is_saving(settings)
    ]
    if settings.initial_load_in_hf and not settings.initial_load_model_only:
        problems.append(
            "checkpoint.initial_load_in_hf reads weights only: leave checkpoint.initial_load_model_only true, or name "
            "a DCP checkpoint as checkpoint.initial_load_path"
        )
    if settings.initial_load_in_hf_quantized and not settings.initial_load_in_hf:
        problems.append("checkpoint.initial_load_in_hf_quantized needs checkpoint.initial_load_in_hf, as in torchtitan")
    unset = model.hf_assets_path == Model().hf_assets_path
    if settings.initial_load_in_hf and not settings.initial_load_path and unset:
        problems.append(
            "checkpoint.initial_load_in_hf names no folder: set checkpoint.initial_load_path or model.hf_assets_path"
        )
    return problems


def export_dtype_note(settings: Checkpoint) -> str:
    """A note if `export_dtype` has no effect, as in torchtitan's own Qwen 3 config; else empty."""
    is_used = settings.last_save_model_only or any(getattr(settings, key) for key in _EXPORTS)
    if is_used or settings.export_dtype == Checkpoint().export_dtype:
        return ""
    return (
        f"checkpoint.export_dtype = {settings.export_dtype!r} has no effect: the last step stays resumable without "
        f"checkpoint.last_save_model_only, and neither {' nor '.join(_EXPORTS)} is set"
    )


def dropout_note(info: ModelInfo, path: Place) -> str:
    """A note on initial weights whose config.json requests dropout in training; else empty."""
    asked = {key: value for key, value in info.untranslated.items() if key.endswith("dropout") and value}
    if not asked:
        return ""
    fields = ", ".join(f"{key} = {value}" for key, value in sorted(asked.items()))
    return f"{path}: {fields} is kept for exports and has no effect here: titan trains without dropout"


def checkpoint_machine_problems(settings: Checkpoint) -> list[str]:
    """A separate writer process needs Linux's memfd."""
    if settings.async_mode == "async_with_pinned_mem" and not hasattr(os, "memfd_create"):
        return ['checkpoint.async_mode = "async_with_pinned_mem" needs Linux; "async" uses a thread']
    return []
