"""What the weights in a folder are: family and numbers, read from titan_model.json, config.json or params.json."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from converters.assets import TOKEN_IDS, find_assets, find_documents, read_carried_ids, read_token_ids
from converters.catalog import Catalog
from converters.containers.hf_cache import snapshot_of
from converters.containers.paths import refuse_links_out
from converters.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.base import (
    LISTED_FOR_EVERY_FAMILY,
    SCALINGS,
    Family,
    ModelArgs,
    Scaling,
    all_numbers,
    args_to_json,
)
from converters.families.registry import all_families, get_family, read_hf_config, read_meta_params
from converters.hf_fields import (
    describe_rewritten,
    extra_generation_settings,
    fields_to_write,
    read_stated_dtype,
    read_untranslated,
    require_without_effect,
)
from converters.json_file import read_json, write_json
from converters.model_numbers import check_args
from converters.names import HF_CONFIG, META_PARAMS, MODEL_INFO

UNTRANSLATED = "untranslated"  # the key of titan_model.json
TELLING_FILES = (MODEL_INFO, HF_CONFIG, META_PARAMS)  # what says what model it is; the first that is there


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A family, the numbers of one model of it, and the files that go with its weights (name → where it lies)."""

    family: str
    args: ModelArgs
    assets: Mapping[str, Path] = field(default_factory=dict)
    token_ids: Mapping[str, Any] = field(
        default_factory=dict
    )  # bos_token_id, eos_token_id (one or several), pad_token_id
    untranslated: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json that `args` does not hold
    stated_dtype: str = field(default="", compare=False)  # config.json's dtype; the weights may have another
    remarks: tuple[str, ...] = field(default=(), compare=False)  # what of config.json is not taken over as it was
    notes: tuple[str, ...] = field(default=(), compare=False)  # what of --model-from is not used

    @property
    def generation(self) -> dict[str, Any]:
        """What transformers would generate with where there is no generation_config.json."""
        return dict(self.token_ids) | extra_generation_settings(self.untranslated)


def says_model(path: Path) -> bool:
    """Whether something in a checkpoint's folder says what model it is."""
    return find_model_file(path) is not None


def find_model_file(path: Path) -> Path | None:
    """The file in a checkpoint's folder that says what model it is."""
    folder = snapshot_of(path) if path.is_dir() else path.parent
    return next((folder / name for name in TELLING_FILES if (folder / name).is_file()), None)


def read_model_info(path: Path, catalog: Catalog | None = None) -> ModelInfo:
    """What a checkpoint says about itself; `catalog` gives the shapes that a params.json leaves open.

    `path`: a folder, or a weights file in one. Raises CheckpointError where nothing there says what the model is.
    """
    folder = snapshot_of(path) if path.is_dir() else path.parent
    assets = find_assets(folder)
    config: dict[str, Any] = {}
    untranslated: dict[str, Any] = {}
    model_file = find_model_file(folder)
    told_by = model_file.name if model_file else None
    refuse_links_out(folder, [*assets.values(), *([folder / told_by] if told_by else [])])  # assets are copied along
    shapes = {name: entry.shape for name, entry in catalog.tensors.items()} if catalog else {}
    if told_by == MODEL_INFO:
        family, args, untranslated = _from_titan(folder / MODEL_INFO)
        _refuse_other_numbers(folder, args, shapes)
    elif told_by == HF_CONFIG:
        config = read_json(folder / HF_CONFIG)
        with _told_with(folder):
            family, args = read_hf_config(config)
    elif told_by == META_PARAMS:
        params = read_json(folder / META_PARAMS)
        with _told_with(folder):
            family, args = read_meta_params(params, shapes)
    else:
        raise CheckpointError(
            f"nothing in {'this folder' if folder == Path() else folder} says what model this is",
            hint=f"looked for {MODEL_INFO} (titan), {HF_CONFIG} (transformers) and {META_PARAMS} (Meta)",
            tries=["--model-from FOLDER, a folder that has one of them"],
        )
    check_args(args, what=str(folder / told_by))
    _check_parameters(family, args, what=str(folder / told_by))
    ids = read_token_ids(assets, vocab_size=args.vocab_size, config=config or untranslated)
    remarks: list[str] = []
    if config:
        with _told_with(folder):
            untranslated = read_untranslated(config, family, args, ids, carried_ids=read_carried_ids(assets, ids))
            remarks = describe_rewritten(config, family, args, ids)
    return ModelInfo(
        family.name,
        args,
        assets | find_documents(folder),
        ids,
        untranslated,
        stated_dtype=read_stated_dtype(config),
        remarks=tuple(remarks),
    )


def _refuse_other_numbers(folder: Path, args: ModelArgs, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError where a config.json or params.json beside titan_model.json describes another model."""
    for name in TELLING_FILES[1:]:
        if not (folder / name).is_file():
            continue
        content = read_json(folder / name)
        with _told_with(folder):
            found = read_hf_config(content)[1] if name == HF_CONFIG else read_meta_params(content, shapes)[1]
        theirs, ours = _stated(found, name), _stated(args, name)
        if odd := [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)]:
            raise CheckpointError(
                f"{folder}: {MODEL_INFO} and {name} describe different models:"
                + list_offenders(
                    [f"{key}: {ours.get(key)} in {MODEL_INFO}, {theirs.get(key)} in {name}" for key in odd]
                ),
                hint=f"{MODEL_INFO} is what titan reads; correct the one that is wrong, or move it away",
            )


def _stated(args: ModelArgs, name: str) -> dict[str, Any]:
    """The numbers that a file of this name can state."""
    numbers = all_numbers(args)
    if name == META_PARAMS:
        scaling = numbers.pop("rope_scaling") or {}
        left_open = ("max_seq_len", "tied", "low_freq_factor", "original_max_position_embeddings")
        numbers |= {f"rope_scaling.{key}": value for key, value in scaling.items()}
        return {key: value for key, value in numbers.items() if key.removeprefix("rope_scaling.") not in left_open}
    return numbers


def _check_parameters(family: Family, args: ModelArgs, *, what: str) -> None:
    """Raise CheckpointError where numbers ask for parameters that the family has no names for."""
    named = {rule.native for rule in next(iter(family.namings.values())).rules}
    asked = (p.fqn.replace("layers.0.", "layers.{n}.") for p in family.parameters(replace(args, num_layers=1)))
    if strange := [fqn for fqn in asked if fqn not in named]:
        raise CheckpointError(f"{what}: a {family.name} model has no such parameters:" + list_offenders(strange))


@contextmanager
def _told_with(folder: Path) -> Iterator[None]:
    """Errors of a family about a file's content, told with the folder that the file lies in."""
    try:
        yield
    except (CheckpointError, UnsupportedError) as error:
        raise type(error)(f"{folder}: {error.message}", hint=error.hint, tries=error.tries) from None


def write_model_info(folder: Path, info: ModelInfo) -> None:
    """titan_model.json: family and numbers, so that nobody types a flavor again; and config.json's other fields."""
    content = {"family": info.family, "args": args_to_json(info.args)}
    write_json(folder / MODEL_INFO, content | ({UNTRANSLATED: dict(info.untranslated)} if info.untranslated else {}))


def write_hf_config(folder: Path, info: ModelInfo, *, dtype: str) -> None:
    """config.json that transformers 4 and 5 open: both spellings of RoPE (the family's part) and of the dtype."""
    fields = fields_to_write(get_family(info.family).hf_config(info.args), info.untranslated)
    own_ids = {key: fields.pop(key) for key in TOKEN_IDS if key in fields}
    write_json(folder / HF_CONFIG, fields | {"dtype": dtype, "torch_dtype": dtype} | dict(info.token_ids) | own_ids)


def meta_params(info: ModelInfo) -> dict[str, Any]:
    """What Meta's params.json says of a model. Raises UnsupportedError where it cannot."""
    say = get_family(info.family).meta_params
    if say is None:
        raise UnsupportedError(f"Meta's format has no {info.family} models")
    return say(info.args)


def write_meta_params(folder: Path, info: ModelInfo) -> None:
    """params.json of Meta's releases."""
    write_json(folder / META_PARAMS, meta_params(info))


def _from_titan(path: Path) -> tuple[Family, ModelArgs, dict[str, Any]]:
    content = read_json(path)
    name, numbers = content.get("family"), content.get("args")
    if not isinstance(name, str) or not isinstance(numbers, dict):
        raise CheckpointError(f"{path} lacks family or args")
    if name not in all_families():
        raise UnsupportedError(
            f"{path} names a model family that is not known here: {name!r}",
            hint=f"families: {', '.join(all_families())}; one of your own is imported first",
            tries=["titan --import MODULE …"],
        )
    family = get_family(name)
    known = {f.name for f in fields(family.args_type)}
    for key, value in LISTED_FOR_EVERY_FAMILY.items():  # a number of another family: nothing but its default
        if key not in known and numbers.get(key, value) is value:
            numbers = {other: given for other, given in numbers.items() if other != key}
    problems = [f"unknown  {key} = {str(value)[:40]}" for key, value in numbers.items() if key not in known]
    problems += [f"missing  {f.name}" for f in fields(ModelArgs)[:7] if f.name not in numbers]
    if problems:
        raise CheckpointError(
            f"{path} does not have the numbers of a model:" + list_offenders(problems),
            hint="written by another version?",
        )
    scaling = numbers.get("rope_scaling")
    args = family.args_type(**{**numbers, "rope_scaling": None if scaling is None else _scaling(scaling, path)})
    untranslated = content.get(UNTRANSLATED, {})
    if untranslated:
        check_args(args, what=str(path))
        require_without_effect(untranslated, family, args, what=f"{path}, {UNTRANSLATED}")
    return family, args, untranslated


def _scaling(numbers: Any, path: Path) -> Scaling:
    """That of Llama 3.1, the first one that titan wrote, has no `rope_type`."""
    kind = numbers.get("rope_type", "llama3") if isinstance(numbers, dict) else None
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise CheckpointError(f"{path}: its rope_scaling has a rope_type {kind!r}, not one of {', '.join(SCALINGS)}")
    given = {key: value for key, value in numbers.items() if key != "rope_type"}
    known = [f.name for f in fields(SCALINGS[kind]) if f.init]
    if given.keys() != set(known):
        raise CheckpointError(f"{path}: its rope_scaling is not {', '.join(sorted(known))} (type {kind})")
    return SCALINGS[kind](**given)
