"""The model of a job as its checkpoints describe it: family, numbers, and the tokenizer's files. Torch-free."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converters.common.errors import CheckpointError, ConfigError, list_offenders
from converters.common.names import TIKTOKEN_MODEL, TOKENIZER_JSON
from converters.families.args import computed_numbers, defining_numbers
from converters.model.model_info import ModelInfo, token_ids_of
from converters.source.model_from import model_type
from converters.source.models_inside import SeveralModels
from converters.source.open import local_folder
from converters.source.weights import NativeWeights
from converters.store.hub_names import download_command, find_local
from converters.store.location import Place
from converters.tokenizers.assets import find_assets
from converters.tokenizers.tokenizer import has_tokenizer, load_tokenizer, tokenizes_differently
from trainer.config.sections import Checkpoint, Model, Training
from trainer.data.index import INDEX_JSON, read_vocab_size
from trainer.data.kinds import TOKENS
from trainer.job.record import Job

NO_TOKENIZER = "checkpoints will have no tokenizer: model.hf_assets_path is not set, and the data has none"


def chosen_model(job: Job) -> ModelInfo:
    """The description of the model for a job's checkpoints.

    Raises ConfigError if the config's tokenizer is missing or differs from the data's. `assets` is empty if no
    tokenizer is configured and none is found; the caller then reports NO_TOKENIZER.
    """
    assets = find_assets(tokenizer_folder(job.config.model, job.config.training))
    token_ids = token_ids_of(job.args, assets)
    return ModelInfo(job.family.name, job.args, assets, token_ids)


@contextmanager
def selected_by_setting() -> Iterator[None]:
    """Name the setting of `titan train` in place of `--select` if a checkpoint holds several models."""
    try:
        yield
    except SeveralModels as error:
        raise SeveralModels(error.place, error.models, option="--checkpoint.initial_load_select ") from None


def refuse_other_model(saved: ModelInfo, wanted: ModelInfo, path: Place) -> None:
    """Raise CheckpointError if the numbers differ, also those that do not affect shapes, such as rope_theta."""
    saved_numbers, numbers = computed_numbers(saved.args), defining_numbers(wanted.args)
    problems = [
        f"{name}: {saved_numbers.get(name)} in the checkpoint, {numbers[name]} in the config"
        for name in numbers
        if saved_numbers.get(name) != numbers[name]
    ]
    if model_type(saved) != model_type(wanted):
        problems.insert(0, f"family: {saved.family} in the checkpoint, {wanted.family} in the config")
    if problems:
        raise CheckpointError(
            f"{path} has another model than the config:" + list_offenders(problems),
            tries=["--model.name FAMILY --model.flavor FLAVOR; `titan models` lists them"],
        )


def refuse_other_form(weights: NativeWeights, path: Place, settings: Checkpoint) -> None:
    """Raise CheckpointError if initial weights are not in a form that checkpoint.initial_load_in_hf… accept."""
    if settings.initial_load_in_hf and not weights.naming.startswith("hf"):
        raise CheckpointError(
            f"checkpoint.initial_load_in_hf: {path} is {weights.catalog.container} with {weights.naming} names",
            hint="without that key the format is detected",
            tries=[f"--checkpoint.no_initial_load_in_hf --checkpoint.initial_load_path {path}"],
        )
    num_bare = sum(info.dtype.startswith("float8") for info in weights.tensors.values())
    if settings.initial_load_in_hf_quantized and num_bare and not weights.quantized:
        raise CheckpointError(
            f"checkpoint.initial_load_in_hf_quantized: {path} holds {num_bare:,} weights in float8, and neither scales "
            "nor a quantization_config that describes them",
            hint="its config.json has lost it, or the scales are missing",
        )
    if weights.quantized and not settings.initial_load_in_hf_quantized:
        raise CheckpointError(
            f"{path} holds {len(weights.quantized.expressions):,} weights in {weights.quantized.scheme}",
            hint="training starts from them, dequantized, where that is asked for",
            tries=["--checkpoint.initial_load_in_hf --checkpoint.initial_load_in_hf_quantized"],
        )


def tokenizer_folder(model: Model, training: Training) -> Path:
    """The folder that the config sets; else the prepared data, which has its tokenizer; else the default."""
    location, data = find_local(model.hf_assets_path, assets="tokenizer"), _prepared_data(training)
    folder = local_folder(location) if location.scheme else location.path
    is_set = model.hf_assets_path != Model().hf_assets_path  # by value: `titan config show` writes defaults too
    if data and not is_set and has_tokenizer(data):
        return data
    if is_set and not has_tokenizer(folder):
        what = f"holds no {TOKENIZER_JSON} or {TIKTOKEN_MODEL}" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f"model.hf_assets_path = {model.hf_assets_path!r} {what}",
            hint="prepared data and HF folders have one; without the key the data's is used",
            tries=[] if folder.is_dir() else download_command(folder, assets="tokenizer"),
        )
    if data and has_tokenizer(folder):
        _refuse_other_vocabulary(folder, data)
    return folder


def _prepared_data(training: Training) -> Path | None:
    """The index that training reads, or the first of several, which all have the same tokenizer."""
    path = next(iter(dict(training.dataset_mix)), training.dataset_path)
    data = Path(path) if training.dataset == TOKENS and path else None
    return data if data and (data / INDEX_JSON).is_file() else None


def _refuse_other_vocabulary(folder: Path, data: Path) -> None:
    """Raise ConfigError if the tokenizer is not the one that the data was made with."""
    if folder.resolve() == data.resolve():
        return
    loaded, num_ours = load_tokenizer(folder), read_vocab_size(data)
    if loaded.vocab_size != num_ours:
        what = f"has {loaded.vocab_size:,} tokens, but training.dataset_path = {str(data)!r} was made with {num_ours:,}"
    elif has_tokenizer(data) and tokenizes_differently(load_tokenizer(data), loaded):
        what = f"has as many tokens as that of training.dataset_path = {str(data)!r}, but tokenizes text differently"
    else:
        return
    raise ConfigError(
        f"model.hf_assets_path = {str(folder)!r} {what}",
        hint="the checkpoints would have a tokenizer that does not match the model's tokens",
        tries=[f"--model.hf_assets_path {data}", f"titan data prepare … --tokenizer {folder}"],
    )
