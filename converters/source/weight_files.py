"""Choose which weight files of a folder are read, as transformers chooses them, and name those that are not read."""

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from converters.common.errors import CheckpointError, TitanError, UnsupportedError, list_offenders
from converters.common.names import HF_CONFIG, HF_INDEX, HF_SINGLE, META_SHARD, TORCH_INDEX, TORCH_SINGLE
from converters.containers.registry import CONTAINERS
from converters.containers.safetensors import SAFETENSORS, read_indexed
from converters.containers.torch_folder import TORCH_SUFFIXES, read_file
from converters.store.base import Store
from converters.store.json_file import read_json
from converters.store.location import Location
from converters.store.paths import checked_file_name
from converters.views.catalog import Catalog

# Weights of other frameworks, which titan does not read
FOREIGN = {".gguf": "GGUF", ".h5": "TensorFlow", ".msgpack": "Flax", ".onnx": "ONNX"}
HF_ENTRIES = (HF_SINGLE, HF_INDEX, TORCH_SINGLE, TORCH_INDEX)  # in the order in which transformers looks for them
_INDEX = re.compile(r".*\.(safetensors|bin)\.index(\.[\w-]+)?\.json")
_SERIES = re.compile(r"(.*)-\d+(-of-\d+\..+)")
_SHARD = re.compile(r"shard-\d+-model-(\d+)-of-(\d+)\.safetensors")  # of DCP's HuggingFaceStorageWriter
ADAPTER = re.compile(r"adapter_model\.(safetensors|pt|bin)")
ADAPTER_CONFIG = "adapter_config.json"
_TORCHTUNE_ADAPTER = "adapter_model.pt"  # PEFT writes .safetensors or .bin, torchtune also this one
_TORCHTUNE_LORA = re.compile(r".*\.(lora_[ab]\.weight|magnitude)")
# State of a fine-tuning run in the folder of the weights (torchtune, transformers, Accelerate)
RUN_STATE = re.compile(
    r"(recipe_state|training_args|(optimizer|scheduler|scaler|sampler|rng_state)(_\d+)?)\.(pt|pth|bin)"
)


def find_hf_entry(store: Store, names: Collection[str]) -> str:
    """The file that transformers 5 opens for a folder's weights; "" if the folder has none of its names.

    It is `transformers_weights` of config.json, else the first of HF_ENTRIES: one file before an index,
    safetensors before torch files (modeling_utils._get_resolved_checkpoint_files).
    """
    if (named := _named_weights(store)) is not None:
        what = f"{store.location / HF_CONFIG}: transformers_weights"
        name = checked_file_name(named, what=what)
        if not name.endswith((".safetensors", ".safetensors.index.json")):
            raise CheckpointError(
                f"{what} is {name}, and transformers takes only *.safetensors and *.safetensors.index.json there",
                hint="correct or remove the key",
            )
        if name not in names:
            raise CheckpointError(f"{what} is {name}, and there is no such file", hint="correct or remove the key")
        return name
    return next((name for name in HF_ENTRIES if name in names), "")


def refuse_mixtures(store: Store, names: Collection[str], entry: str) -> None:
    """Raise CheckpointError if a folder holds weights of two saves, and nothing says which of them is meant.

    transformers reads every safetensors file of a folder that has shards of DCP's writer, in the directory's order, and
    a whole file before a series, whichever is older. A file that config.json names is taken.
    """
    folder = store.location
    weights = {name for name in names if not ADAPTER.fullmatch(name) and not RUN_STATE.fullmatch(name)}
    shards = {name for name in weights if _SHARD.fullmatch(name)}
    whole = [name for name in (HF_SINGLE, TORCH_SINGLE) if name == entry]
    if shards:
        rest = {n for n in weights - shards if n.endswith(".safetensors") or n in HF_ENTRIES or _INDEX.fullmatch(n)}
        _check_series(folder, shards)
    elif whole and _named_weights(store) is None:
        shards, rest = set(whole), {name for name in weights if _is_part(name, whole[0])}
    else:
        rest = set()
    if rest:
        shown = [*_fold_series(sorted(shards)), *_fold_series(sorted(rest))]
        raise CheckpointError(
            f"{folder}: holds the weights twice, whole and in parts, maybe of two saves:{list_offenders(shown)}",
            hint="transformers mixes or prefers them without a word; move those that are not meant to another folder",
            tries=[str(folder / name) for name in whole],
        )


def _check_series(folder: Location, shards: Iterable[str]) -> None:
    """Raise CheckpointError if shards belong to series of different lengths, or a part of the series is missing."""
    numbers = {tuple(map(int, found.groups())) for name in shards if (found := _SHARD.fullmatch(name))}
    lengths = sorted({length for _, length in numbers})
    if len(lengths) > 1:
        raise CheckpointError(
            f"{folder}: shards of several saves, by their names: {', '.join(f'-of-{n:05}' for n in lengths)}",
            hint="move those of the other save to another folder",
        )
    if absent := sorted(set(range(1, lengths[0] + 1)) - {number for number, _ in numbers}):
        missing = [f"shard-*-model-{number:05}-of-{lengths[0]:05}.safetensors" for number in absent]
        raise CheckpointError(f"{folder}: shards are missing:{list_offenders(missing)}", hint="copy the folder again")


def _is_part(name: str, whole: str) -> bool:
    """Whether a file is a part of the same weights in a series: model-00001-of-00003.safetensors."""
    stem, suffix = whole.split(".")
    return re.fullmatch(rf"{stem}-\d+-of-\d+\.{suffix}", name) is not None


def refuse_other_torch_files(catalog: Catalog, names: Collection[str]) -> None:
    """Raise CheckpointError if pytorch_model.bin beside safetensors is another model: other shapes or layers."""
    if catalog.container != SAFETENSORS.name or _named_weights(catalog.store) is not None:
        return
    try:
        if TORCH_INDEX in names and TORCH_SINGLE not in names:
            in_torch = read_indexed(catalog.store, TORCH_INDEX, read_file)
        elif TORCH_SINGLE in names:
            in_torch = read_file(catalog.store, TORCH_SINGLE)
        else:
            return
    except TitanError:  # it cannot be compared, and is not read either
        return
    tensors = catalog.tensors
    patterns = [{_without_numbers(name) for name in each} for each in (tensors, in_torch)]
    problems = [
        f"{name}: {list(tensors[name].shape)} in safetensors, {list(in_torch[name].shape)} in torch files"
        for name in tensors.keys() & in_torch.keys()
        if tensors[name].shape != in_torch[name].shape
    ]
    problems += [
        f"{name}: only in {'safetensors' if name in tensors else 'torch files'}"
        for name in tensors.keys() ^ in_torch.keys()
        if _without_numbers(name) in patterns[0] & patterns[1]
    ]
    if problems:
        raise CheckpointError(
            f"{catalog.location}: holds other weights as safetensors than as torch files:"
            + list_offenders(sorted(problems)),
            hint="transformers takes safetensors; move the files that are not meant to another folder",
        )


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _named_weights(store: Store) -> object:
    """The file of the weights that config.json names; None if it names none."""
    with suppress(TitanError):  # a damaged config.json is reported when the numbers are read
        return read_json(store.local([HF_CONFIG]) / HF_CONFIG).get("transformers_weights")
    return None


def name_unread(catalog: Catalog, names: Collection[str], *, entry: str) -> dict[str, str]:
    """Weight files of a folder that its catalog does not use, with the reason. `entry`: find_hf_entry's answer."""
    used = catalog.tensor_files | {entry}
    used |= {chunk.file for chunks in catalog.copies.values() for chunk in chunks}
    reason = f"transformers takes {entry}" if entry else f"the folder is read as {CONTAINERS[catalog.container].title}"
    unnamed = []
    for name in sorted(names):
        suffix = Path(name).suffix
        is_weights = suffix in (*TORCH_SUFFIXES, ".safetensors", *FOREIGN) or _INDEX.fullmatch(name)
        if is_weights and name not in used and not ADAPTER.fullmatch(name) and not RUN_STATE.fullmatch(name):
            unnamed.append(name)
    unread = dict.fromkeys(_fold_series(unnamed), reason)
    inside = catalog.store.names("original") if "original/" in names else []
    originals = [name for name in inside if name.startswith(META_SHARD.format(index=0)[:-6])]
    if originals and not CONTAINERS[catalog.container].marks(originals):
        unread["original/" + originals[0] + (f" and {len(originals) - 1} more" if originals[1:] else "")] = reason
    return unread


def _fold_series(names: Iterable[str]) -> list[str]:
    """Files of one series (model-00001-of-00003.safetensors) as one entry."""
    groups: dict[object, list[str]] = {}
    for name in names:
        match = _SERIES.fullmatch(name)
        groups.setdefault(match.groups() if match else name, []).append(name)
    return [found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" for found in groups.values()]


def name_adapters(catalog: Catalog, names: Collection[str]) -> dict[str, str]:
    """LoRA adapters beside the weights, and why each is not read.

    Raises UnsupportedError if transformers would add one to the weights: with PEFT installed it does so wherever
    there is an adapter_config.json, and without the adapter's file it fails. torchtune's recipes save an adapter
    beside weights that it is merged into already, so those weights are read without it.
    """
    adapters = sorted(name for name in names if ADAPTER.fullmatch(name))
    folder = catalog.location
    if not CONTAINERS[catalog.container].is_for_transformers:
        return dict.fromkeys(adapters, "a LoRA adapter, which the readers of this format do not apply")
    if _is_torchtune_adapter(catalog.store, names):
        reason = (
            "a LoRA adapter; the names in adapter_model.pt are torchtune's, whose recipes merge it into the weights "
            "that they save in the same folder (not checked here)"
        )
        again = "transformers with PEFT would add the adapter to these weights; remove this file before using it there"
        return dict.fromkeys(adapters, reason) | ({ADAPTER_CONFIG: again} if ADAPTER_CONFIG in names else {})
    if ADAPTER_CONFIG not in names:
        return dict.fromkeys(adapters, f"a LoRA adapter without {ADAPTER_CONFIG}: transformers does not apply it")
    raise UnsupportedError(
        f"{folder}: {ADAPTER_CONFIG} in the folder of the weights: with PEFT, transformers adds the LoRA adapter "
        f"({', '.join(adapters) or 'whose file is missing'}) to them, and titan does not",
        hint="merge it with PEFT, or move the files adapter_* elsewhere to use the weights without it",
        tries=[merge_command(folder, folder.with_name(folder.name + "-merged"))] if adapters else [],
    )


def merge_command(folder: Location, merged: Location) -> str:
    """The command line that merges an adapter into its base model."""
    code = (
        "import sys; sys.modules['torchao'] = None; from peft import AutoPeftModelForCausalLM as Model; "
        f"Model.from_pretrained('{folder}').merge_and_unload().save_pretrained('{merged}')"
    )
    return f'python -c "{code}"'


def _is_torchtune_adapter(store: Store, names: Collection[str]) -> bool:
    if _TORCHTUNE_ADAPTER not in names:
        return False
    try:
        found = read_file(store, _TORCHTUNE_ADAPTER)
    except TitanError:
        return False
    return bool(found) and all(_TORCHTUNE_LORA.fullmatch(name) for name in found)
