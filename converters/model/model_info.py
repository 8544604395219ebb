"""The model of the weights in a folder: family and numbers, from titan_model.json, config.json or params.json."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.common.names import HF_CONFIG, META_PARAMS, MODEL_INFO, UNTRANSLATED
from converters.families.args import (
    LISTED_FOR_EVERY_FAMILY,
    DecoderArgs,
    ModelArgs,
    args_to_json,
    computed_numbers,
    decoder_args,
)
from converters.families.base import Family
from converters.families.hf_versions import differences_of_version
from converters.families.model_numbers import check_args, check_blocks
from converters.families.registry import all_families, as_hf_config, get_family, read_hf_config, read_meta_params
from converters.families.rope import SCALINGS, Scaling
from converters.model.hf_fields import (
    describe_rewritten,
    extra_generation_settings,
    fields_to_write,
    read_stated_dtype,
    read_untranslated,
    require_without_effect,
)
from converters.model.multimodal import OUTER, find_files, joined_config, split_config
from converters.quantized.quantization import KEY, Scheme, quantization_config, read_quantization
from converters.store.hf_cache import folder_of
from converters.store.json_file import read_json, write_json
from converters.store.local_files import is_file, names_in
from converters.store.paths import refuse_links_out
from converters.tokenizers.assets import TOKEN_IDS, find_assets, find_documents, read_carried_ids, read_token_ids
from converters.views.catalog import Catalog

MODEL_FILES = (MODEL_INFO, HF_CONFIG, META_PARAMS)  # that describe the model; the first one present is read


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A family, the numbers of one model of it, and the files that accompany its weights (name → path)."""

    family: str
    args: ModelArgs
    assets: Mapping[str, Path] = field(default_factory=dict)
    token_ids: Mapping[str, Any] = field(
        default_factory=dict
    )  # bos_token_id, eos_token_id (one or several), pad_token_id
    untranslated: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json that `args` does not hold
    outer: Mapping[str, Any] = field(default_factory=dict)  # and those around a multimodal model's text part
    stated_dtype: str = field(default="", compare=False)  # config.json's dtype; the weights may have another
    stated_mtp_layers: int = field(default=0, compare=False)  # the weights may have fewer
    remarks: tuple[str, ...] = field(default=(), compare=False)  # fields of config.json that were changed
    notes: tuple[str, ...] = field(default=(), compare=False)  # files of --model-from that are not used, and others
    quantization: Scheme | None = field(default=None, compare=False)  # config.json's, of the weights in its folder

    @property
    def decoder(self) -> DecoderArgs:
        """The numbers of a decoder. Raises UnsupportedError for another model."""
        return decoder_args(self.args)

    @property
    def generation(self) -> dict[str, Any]:
        """The settings that transformers would use without a generation_config.json."""
        return dict(self.token_ids) | extra_generation_settings(self.untranslated)


def describes_model(path: Path) -> bool:
    """Whether a file in a checkpoint's folder describes its model."""
    return find_model_file(path) is not None


def description_folder(path: Path) -> Path:
    """The folder of the files that describe the model of a checkpoint: its own or, for shards of several ranks, where
    trainers put them: .hf_metadata in it (NeMo Automodel), or the folder above (transformers, torchtitan).
    """
    folder = folder_of(path)
    places = [folder]
    if any(fnmatch(name, "shard-*-model-*.safetensors") for name in names_in(folder)):
        places += [folder / ".hf_metadata", folder.absolute().parent]
    return next((place for place in places if any(is_file(place / name) for name in MODEL_FILES)), folder)


def find_model_file(path: Path) -> Path | None:
    """The file that describes a checkpoint's model."""
    folder = description_folder(path)
    return next((folder / name for name in MODEL_FILES if is_file(folder / name)), None)


def read_model_info(path: Path, catalog: Catalog | None = None) -> ModelInfo:
    """The model that a checkpoint's folder describes; `catalog` gives the shapes that a params.json leaves open.

    `path`: a folder, or a weights file in one. Raises CheckpointError if no file there describes the model.
    """
    folder = description_folder(path)
    assets = find_assets(folder)
    config: dict[str, Any] = {}
    untranslated: dict[str, Any] = {}
    outer: dict[str, Any] = {}
    quantization: Scheme | None = None
    model_file = find_model_file(folder)
    described_by = model_file.name if model_file else None
    refuse_links_out(folder, [*assets.values(), *([folder / described_by] if described_by else [])])
    shapes = {name: entry.shape for name, entry in catalog.tensors.items()} if catalog else {}
    if described_by == MODEL_INFO:
        family, args, untranslated, outer = _from_titan(folder / MODEL_INFO)
        _refuse_other_numbers(folder, args, shapes)
    elif described_by == HF_CONFIG:
        with _naming_folder(folder):
            text, outer = split_config(read_json(folder / HF_CONFIG))
            config = dict(as_hf_config(text))
            family, args = read_hf_config(config)
            quantization = read_quantization(config)
    elif described_by == META_PARAMS:
        params = read_json(folder / META_PARAMS)
        with _naming_folder(folder):
            family, args = read_meta_params(params, shapes)
    else:
        raise CheckpointError(
            f"nothing in {'this folder' if folder == Path() else folder} describes the model",
            hint=f"looked for {MODEL_INFO} (titan), {HF_CONFIG} (transformers) and {META_PARAMS} (Meta)",
            tries=["--model-from FOLDER, a folder that has one of them"],
        )
    check_args(args, what=str(folder / described_by))
    check_blocks(family, args, what=str(folder / described_by))
    _check_parameters(family, args, what=str(folder / described_by))
    ids = token_ids_of(args, assets, config or untranslated)
    remarks: list[str] = []
    notes: list[str] = []
    if config:
        notes = differences_of_version(config, args)
        with _naming_folder(folder):
            untranslated = read_untranslated(config, family, args, ids, carried_ids=read_carried_ids(assets, ids))
            remarks = describe_rewritten(config, family, args, ids)
    return ModelInfo(
        family.name,
        args,
        assets
        | find_documents(folder)
        | (find_files(folder, family.multimodal) if outer and family.multimodal else {}),
        ids,
        untranslated,
        outer,
        stated_dtype=read_stated_dtype(config),
        stated_mtp_layers=config.get("num_nextn_predict_layers", 0) or getattr(args, "num_mtp_layers", 0),
        remarks=tuple(remarks),
        notes=tuple(notes),
        quantization=quantization,
    )


def token_ids_of(
    args: ModelArgs, assets: Mapping[str, Path], config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """bos, eos and pad ids (see read_token_ids); a model that is no decoder has none."""
    return read_token_ids(assets, vocab_size=args.vocab_size, config=config) if isinstance(args, DecoderArgs) else {}


def _refuse_other_numbers(folder: Path, args: ModelArgs, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if a config.json or params.json contradicts titan_model.json."""
    for name in MODEL_FILES[1:]:
        if not is_file(folder / name):
            continue
        content = read_json(folder / name)
        with _naming_folder(folder):
            is_hf = name == HF_CONFIG
            file_args = read_hf_config(split_config(content)[0])[1] if is_hf else read_meta_params(content, shapes)[1]
        file_values, values = _stated(file_args, name), _stated(args, name)
        if differing := [key for key in {**values, **file_values} if file_values.get(key) != values.get(key)]:
            raise CheckpointError(
                f"{folder}: {MODEL_INFO} and {name} describe different models:"
                + list_offenders(
                    [f"{key}: {values.get(key)} in {MODEL_INFO}, {file_values.get(key)} in {name}" for key in differing]
                ),
                hint=f"titan reads {MODEL_INFO}; correct or remove the one that is wrong",
            )


def _stated(args: ModelArgs, name: str) -> dict[str, Any]:
    """The numbers that a file of this name can state."""
    numbers = computed_numbers(args)
    if name == META_PARAMS:
        scaling = numbers.pop("rope_scaling") or {}
        left_open = ("max_seq_len", "tied", "low_freq_factor", "original_max_position_embeddings")
        numbers |= {f"rope_scaling.{key}": value for key, value in scaling.items()}
        return {key: value for key, value in numbers.items() if key.removeprefix("rope_scaling.") not in left_open}
    return numbers


def _check_parameters(family: Family, args: ModelArgs, *, what: str) -> None:
    """Raise CheckpointError if the numbers need parameters that the family does not have."""
    if not family.namings:
        return
    naming = family.naming_for(next(iter(family.namings.values())), args)
    named = {rule.native for rule in naming.rules}
    asked = [p.fqn for p in family.parameters(replace(args, num_layers=1) if isinstance(args, DecoderArgs) else args)]
    with_number = {fqn: re.sub(r"^(\w+)\.\d+\.", r"\1.{n}.", fqn) for fqn in asked}
    if strange := [fqn for fqn in asked if fqn not in named and with_number[fqn] not in named]:
        raise CheckpointError(
            f"{what}: a {family.name} model has no such parameters:" + list_offenders(strange),
            hint=f"the family's naming {naming.name!r} has no rule for them",
        )


@contextmanager
def _naming_folder(folder: Path) -> Iterator[None]:
    """Add the folder to a family's errors about a file's content."""
    try:
        yield
    except (CheckpointError, UnsupportedError) as error:
        raise type(error)(f"{folder}: {error.message}", hint=error.hint, tries=error.tries) from None


def write_model_info(folder: Path, info: ModelInfo) -> None:
    """Write titan_model.json: family, numbers, and the other fields of config.json."""
    content = {"family": info.family, "args": args_to_json(info.args)}
    more = {UNTRANSLATED: dict(info.untranslated), OUTER: dict(info.outer)}
    write_json(folder / MODEL_INFO, content | {key: value for key, value in more.items() if value})


def write_hf_config(folder: Path, info: ModelInfo, *, dtype: str, quantization: Scheme | None = None) -> None:
    """Write config.json for transformers 4 and 5: with both spellings of RoPE (the family's part) and of the dtype.

    `quantization`: of the weights that it describes; `info` says how its source was quantized.
    """
    family = get_family(info.family)
    fields = fields_to_write(family.hf_config(info.args), info.untranslated)
    own_ids = {key: fields.pop(key) for key in TOKEN_IDS if key in fields}
    quantized = {} if quantization is None else {KEY: quantization_config(quantization)}
    dtypes = {"dtype": dtype, "torch_dtype": dtype}
    if info.outer and family.multimodal:
        text = fields | dict(info.token_ids) | own_ids
        whole = joined_config(text, info.outer, family.multimodal, info.decoder, dtype=dtype)
        write_json(folder / HF_CONFIG, whole | quantized)
        return
    write_json(folder / HF_CONFIG, fields | quantized | dtypes | dict(info.token_ids) | own_ids)


def meta_params(info: ModelInfo) -> dict[str, Any]:
    """The content of Meta's params.json. Raises UnsupportedError if it cannot describe the model."""
    meta = get_family(info.family).meta
    if meta is None:
        raise UnsupportedError(f"Meta's format has no {info.family} models")
    return meta.params(info.args)


def write_meta_params(folder: Path, info: ModelInfo) -> None:
    """Write params.json of Meta's releases."""
    write_json(folder / META_PARAMS, meta_params(info))


def _from_titan(path: Path) -> tuple[Family, ModelArgs, dict[str, Any], dict[str, Any]]:
    content = read_json(path)
    name, numbers = content.get("family"), content.get("args")
    if not isinstance(name, str) or not isinstance(numbers, dict):
        raise CheckpointError(f"{path} lacks family or args")
    if name not in all_families():
        raise UnsupportedError(
            f"{path} names an unknown model family: {name!r}",
            hint=f"families: {', '.join(all_families())}; import your own family first",
            tries=["titan --import MODULE …"],
        )
    family = get_family(name)
    field_names = {f.name for f in fields(family.args_type)}
    for key, value in LISTED_FOR_EVERY_FAMILY.items():  # a number of another family may only have its default
        if key not in field_names and numbers.get(key, value) is value:
            numbers = {number: default for number, default in numbers.items() if number != key}
    problems = [f"unknown  {key} = {str(value)[:40]}" for key, value in numbers.items() if key not in field_names]
    problems += [
        f"missing  {f.name}" for f in fields(family.args_type) if f.default is MISSING and f.name not in numbers
    ]
    if problems:
        raise CheckpointError(
            f"{path} does not have the numbers of a model:" + list_offenders(problems),
            hint="written by another version?",
        )
    if (scaling := numbers.get("rope_scaling")) is not None:
        numbers = {**numbers, "rope_scaling": _scaling(scaling, path)}
    lists = {f.name for f in fields(family.args_type) if isinstance(f.default, tuple)}
    numbers = {key: tuple(v) if key in lists and isinstance(v, list) else v for key, v in numbers.items()}
    args = family.args_type(**numbers)
    untranslated, outer = content.get(UNTRANSLATED, {}), content.get(OUTER, {})
    if not isinstance(outer, dict) or (outer and family.multimodal is None):
        raise CheckpointError(f"{path}: {OUTER} is not an object, or {name} has no multimodal class")
    if untranslated:
        check_args(args, what=str(path))
        require_without_effect(untranslated, family, args, what=f"{path}, {UNTRANSLATED}")
    return family, args, untranslated, outer


def _scaling(numbers: Any, path: Path) -> Scaling:
    """Parse `rope_scaling`; without a `rope_type` it is that of Llama 3.1, which titan wrote first."""
    kind = numbers.get("rope_type", "llama3") if isinstance(numbers, dict) else None
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise CheckpointError(f"{path}: its rope_scaling has a rope_type {kind!r}, not one of {', '.join(SCALINGS)}")
    settings = {key: value for key, value in numbers.items() if key != "rope_type"}
    field_names = [f.name for f in fields(SCALINGS[kind]) if f.init]
    if settings.keys() != set(field_names):
        raise CheckpointError(f"{path}: its rope_scaling is not {', '.join(sorted(field_names))} (type {kind})")
    return SCALINGS[kind](**settings)
