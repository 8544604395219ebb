"""Remarks of a conversion about everything but the weights: dtype, tokenizer, other files, fields of config.json."""

from collections.abc import Mapping

from converters.common.box import TensorInfo, count_dtypes
from converters.common.dtypes import DTYPES
from converters.common.errors import CheckpointError, UnsupportedError, printable
from converters.common.names import (
    ASSETS_FOLDER,
    HF_CONFIG,
    HF_INDEX,
    MANIFEST,
    META_PARAMS,
    MODEL_INFO,
    OPENAI_DTYPES,
    TORCH_INDEX,
)
from converters.containers.registry import CONTAINERS
from converters.families.args import DecoderArgs
from converters.model.model_info import ModelInfo
from converters.quantized.quantized_tensors import QuantizedTensors
from converters.store.base import names_at
from converters.tokenizers.assets import TOKENIZERS, largest_token_id
from converters.views.catalog import Catalog

_READ = (OPENAI_DTYPES, MANIFEST, MODEL_INFO, HF_CONFIG, META_PARAMS, HF_INDEX, TORCH_INDEX, ASSETS_FOLDER)
_MOST_NAMES = 20


def describe_dtypes(
    info: ModelInfo, weights: Mapping[str, TensorInfo], written: Mapping[str, TensorInfo], *, to: str, dtype: str | None
) -> list[str]:
    """Where an output's config.json gives another element type than the source's, or one that not all weights have.

    `weights`: of the source; `written`: of the output; `dtype`: what they are cast to, if at all.
    """
    (own, *_), (first, *others) = _floating(weights), _floating(written)
    remarks = []
    if info.stated_dtype and dtype is None and info.stated_dtype not in (own, first):
        remarks.append(f"{HF_CONFIG} says dtype {info.stated_dtype}, the weights are {own}: the output says {first}")
    if to == "hf" and others:
        remarks.append(
            f"the weights are {first} and {', '.join(others)}; {HF_CONFIG} says dtype {first}, and transformers "
            "converts all of them to that by default"
        )
    return remarks


def describe_quantized(quantized: QuantizedTensors | None) -> str:
    """How weights of a checkpoint are quantized; "" if they are not."""
    if quantized is None:
        return ""
    return f"{len(quantized.expressions):,} weights from {quantized.scheme}, now {quantized.dtype}"


def _floating(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Floating element types, the one with most bytes first."""
    return [name for name in count_dtypes(tensors) if DTYPES[name].is_floating] or [""]


def describe_tokenizer(info: ModelInfo) -> str:
    """What is wrong with the tokenizer: there is none, or it has more tokens than the model; "" if nothing."""
    if not isinstance(info.args, DecoderArgs):
        return ""
    name = next((name for name in TOKENIZERS if name in info.assets), None)
    if name is None:
        return f"no tokenizer: the source has none of {', '.join(TOKENIZERS)} (--model-from can add one)"
    try:
        largest, rows = largest_token_id(info.assets), info.args.vocab_size
    except (CheckpointError, UnsupportedError) as error:
        return f"{name} is copied unread: {error.message}"
    if largest is None or largest < rows:
        return ""
    return (
        f"{name} has {largest + 1:,} token ids (the largest is {largest:,}), the embedding {rows:,} rows: "
        f"the model cannot read ids from {rows:,} on; is this the tokenizer of another model?"
    )


def describe_left_files(catalog: Catalog, info: ModelInfo) -> str:
    """Files of the source's folder that are not in the output; "" if there are none. Hidden ones do not count."""
    holding = catalog.tensor_files
    of_weights = [container for container in CONTAINERS.values() if not container.has_common_suffixes]
    carried = {path.absolute() for path in info.assets.values()}
    inside = [f"{ASSETS_FOLDER}/{name}" for name in names_at(catalog.location / ASSETS_FOLDER)]
    left = [
        name
        for name in sorted([*catalog.store.names(), *inside], key=lambda name: ("/" in name[:-1], name.rstrip("/")))
        if not (path := catalog.root / name).name.startswith(".")
        and path.name not in (*_READ, *holding, *(name.split("/")[0] for name in catalog.unread))
        and not any(container.is_data(name) for container in of_weights)  # the catalog's notes name them
        and path.absolute() not in carried
        and not any(path.absolute() in each.parents for each in carried)
    ]
    return f"files that are not copied: {_list(left)}" if left else ""


def describe_lone_file(info: ModelInfo) -> str:
    """What an output of a single file of weights leaves out."""
    left = [*info.assets, *(f"{HF_CONFIG}'s {key}" for key in (*info.untranslated, *info.outer))]
    return f"dropped, one file of weights cannot hold it: {_list(left)}" if left else ""


def _list(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(map(printable, names[:_MOST_NAMES])) + (f" and {more} more" if more > 0 else "")
