"""Find which model a checkpoint is. `--model-from` adds what it does not state, and must not contradict it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, ConfigError, UnsupportedError, list_offenders, printable
from converters.common.names import HF_CONFIG, HF_GENERATION_CONFIG, MANIFEST, META_PARAMS, TIKTOKEN_MODEL
from converters.containers.registry import CONTAINERS
from converters.families.args import computed_numbers, defining_numbers
from converters.families.registry import as_hf_config, get_family
from converters.model.hf_fields import COSMETIC
from converters.model.model_info import ModelInfo, find_model_file, read_model_info, token_ids_of
from converters.source.open import local_folder
from converters.store.json_file import load_with_repeated_keys, read_json
from converters.store.local_files import read_bytes
from converters.store.location import Location, Place, locate
from converters.store.paths import refuse_links_out
from converters.tokenizers.assets import (
    CLASS_DEFAULTS,
    TOKEN_IDS,
    TOKENIZERS,
    find_assets,
    find_documents,
)
from converters.views.catalog import Catalog

_VERSION = "transformers_version"  # of the version that saved a file of settings


def find_model_info(
    catalog: Catalog, weights: Catalog, *, model_from: Place | None = None, otherwise: ModelInfo | None = None
) -> ModelInfo:
    """The checkpoint's model, completed by `model_from`; `otherwise` if no file describes it.

    `weights`: the part of `catalog` that is the model. Raises ConfigError, listing both values, if `model_from`
    contradicts the checkpoint, and CheckpointError if neither describes the model.
    """
    model_file = find_model_file(catalog.root)
    if model_from is None:
        return otherwise if otherwise and not model_file else read_model_info(catalog.root, weights)
    place, folder = locate(model_from), local_folder(model_from)
    if model_file is None:
        supplied = _without_documents(read_model_info(folder, weights), folder)
        assets: dict[str, Path] = {}
        if not CONTAINERS[catalog.container].has_common_suffixes:  # the file may be in any folder, among other files
            assets = find_assets(catalog.root)
            refuse_links_out(catalog.root, assets.values())
        info = replace(supplied, assets=assets | find_documents(catalog.root), token_ids={}, stated_dtype="")
        return _complete(info, supplied, catalog.location, place)
    way_out = (
        f"--model-from adds only what the checkpoint does not state; correct or remove {model_file} if that is wrong, "
        "else leave --model-from out"
    )
    try:
        info = read_model_info(catalog.root, weights)
    except (CheckpointError, UnsupportedError) as error:
        hint = "\n".join(filter(None, (error.hint, way_out)))
        raise type(error)(error.message, hint=hint, tries=error.tries) from error
    folder_file = find_model_file(folder)
    if folder_file is None:
        supplied = ModelInfo(info.family, info.args, _only_assets(folder, place))
    else:
        supplied = _without_documents(read_model_info(folder, weights), folder)
    if model_file.name == META_PARAMS and "max_seq_len" not in read_json(model_file):  # chosen by its readers
        info = replace(info, args=replace(info.decoder, max_seq_len=supplied.decoder.max_seq_len))
    info_fields = _fields(info, is_whole=has_all_fields(model_file))
    supplied_fields = _fields(supplied, is_whole=folder_file is not None and has_all_fields(folder_file))
    values = {"family": model_type(info), **defining_numbers(info.args), **info_fields, **_sure_ids(info)}
    supplied_values = {
        "family": model_type(supplied),
        **computed_numbers(supplied.args),
        **supplied_fields,
        **_sure_ids(supplied),
    }
    problems = _contradictions(values, supplied_values) + _other_tokenizer(info.assets, supplied.assets)
    if problems:
        raise ConfigError(
            f"--model-from {place} contradicts {catalog.location}:" + list_offenders(problems),
            hint=way_out,
            tries=[f"titan verify {catalog.location} --accept, after a change"]
            if MANIFEST in catalog.store.names()
            else [],
        )
    if not has_all_fields(model_file) and not info.untranslated:
        info = replace(info, untranslated=supplied.untranslated)
    return _complete(info, supplied, catalog.location, place)


def _contradictions(values: Mapping[str, Any], supplied: Mapping[str, Any]) -> list[str]:
    return [
        f"{printable(key)}: {value!r:.200} in the checkpoint, {supplied[key]!r:.200} in --model-from"
        for key, value in values.items()
        if key in supplied and value != supplied[key] and repr(value) != repr(supplied[key])  # NaN is not equal to NaN
    ]


def has_all_fields(file: Path) -> bool:
    """Whether a file is transformers' config.json, where a missing field has its default."""
    if file.name != HF_CONFIG:
        return False
    content = read_json(file)
    return as_hf_config(content) is content


def model_type(info: ModelInfo) -> str:
    """The model's family, as transformers calls it: llama2 and llama3 are one.

    Older versions of titan wrote llama3 for both.
    """
    return str(get_family(info.family).hf_config(info.args).get("model_type", info.family))


def _only_assets(folder: Path, place: Location) -> dict[str, Path]:
    """The tokenizer of a folder that does not describe a model. Raises CheckpointError if it has none either."""
    assets = find_assets(folder)
    refuse_links_out(folder, assets.values())
    if not assets:
        raise CheckpointError(
            f"--model-from {place}: neither a tokenizer nor a file that describes a model",
            hint="the checkpoint describes its model; --model-from can add a tokenizer",
        )
    return assets


def _without_documents(info: ModelInfo, folder: Path) -> ModelInfo:
    """`info` without licence and model card, which belong to the weights of that folder."""
    documents = find_documents(folder)
    return replace(info, assets={name: path for name, path in info.assets.items() if name not in documents})


def _fields(info: ModelInfo, *, is_whole: bool) -> dict[str, Any]:
    """The fields of config.json that args do not hold. In a complete one a missing cosmetic field has its default."""
    fields = {key: value for key, value in info.untranslated.items() if key not in TOKEN_IDS}
    if not (is_whole or info.untranslated):
        return fields
    written = get_family(info.family).hf_config(info.args)
    return {key: written[key] for key in COSMETIC if key in written} | fields


def _sure_ids(info: ModelInfo) -> dict[str, Any]:
    """The token ids without those that may be only the defaults of the config class."""
    if HF_GENERATION_CONFIG in info.assets or not info.assets.keys().isdisjoint(TOKENIZERS):
        return dict(info.token_ids)
    return {key: id for key, id in info.token_ids.items() if id != CLASS_DEFAULTS.get(key)}


def _other_tokenizer(assets: Mapping[str, Path], supplied: Mapping[str, Path]) -> list[str]:
    return [
        f"{name}: {assets[name]} and {supplied[name]} are different tokenizers"
        for name in TOKENIZERS
        if name in assets and name in supplied and not _same_content(assets[name], supplied[name])
    ]


def _complete(info: ModelInfo, supplied: ModelInfo, location: Location, place: Location) -> ModelInfo:
    """`info` with the files and token ids that it lacks and `supplied` has."""
    if problems := _other_tokenizer(info.assets, supplied.assets):
        raise ConfigError(
            f"--model-from {place} has another tokenizer than {location}:" + list_offenders(problems),
            hint="remove the one that does not belong to the weights",
        )
    notes = []
    added = {name: path for name, path in supplied.assets.items() if name not in info.assets}
    kinds, supplied_kinds = ({name for name in TOKENIZERS if name in each.assets} for each in (info, supplied))
    if kinds and supplied_kinds and not kinds & supplied_kinds:  # of two kinds, which cannot be compared
        added = {name: path for name, path in added.items() if name == HF_GENERATION_CONFIG}
        notes.append(f"the tokenizer is the checkpoint's own ({', '.join(kinds)}), not --model-from's")
    differing = sorted(name for name in supplied.assets.keys() & info.assets.keys() - set(TOKENIZERS))
    if differing := [name for name in differing if not _same_content(info.assets[name], supplied.assets[name])]:
        notes.append(f"--model-from has other contents in {', '.join(differing)}; the checkpoint's own are used")
    length, supplied_length = (computed_numbers(each.args).get("max_seq_len") for each in (info, supplied))
    if length != supplied_length:
        notes.append(f"max_seq_len is the checkpoint's own, {length}; --model-from has {supplied_length}")
    assets = {**info.assets, **added}
    ids = {**info.token_ids, **_sure_ids(supplied), **_sure_ids(info)}
    return replace(
        info,
        assets=assets,
        token_ids=token_ids_of(info.args, assets, ids),
        notes=(*info.notes, *notes),
    )


def _same_content(a: Path, b: Path) -> bool:
    """Whether two files are equal, as JSON if they are JSON: transformers indents the files that it saves."""
    one, other = read_bytes(a), read_bytes(b)
    if one == other or a.name == TIKTOKEN_MODEL or a.suffix != ".json":
        return one == other
    try:
        parsed = [load_with_repeated_keys(text.decode("utf-8-sig"))[0] for text in (one, other)]
    except (ValueError, RecursionError):
        return False
    for content in parsed:
        if isinstance(content, dict):
            content.pop(_VERSION, None)
    return bool(parsed[0] == parsed[1])
