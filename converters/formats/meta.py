"""Meta's original format: params.json and consolidated.NN.pth, one for each model-parallel rank.

torchtune opens a single one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from converters.common.errors import ConfigError, UnsupportedError, list_offenders
from converters.common.fold import fold_texts
from converters.formats.base import CommandHelp, Contents, Format, OutputOptions

if TYPE_CHECKING:
    from converters.containers.target import Target
    from converters.families.args import DecoderArgs
    from converters.families.base import Family, Naming
    from converters.views.expressions import Expression

NUM_SHARDS = (1, 2, 4, 8, 16)  # that Meta has released


def _naming(family: Family, options: OutputOptions) -> Naming:
    if "meta" not in family.namings:
        raise UnsupportedError(f"Meta's format has no {family.name} models")
    return family.namings["meta"]


def _plan(contents: Contents, options: OutputOptions) -> Target:
    from converters.containers.torch_write import plan_meta
    from converters.model.model_info import meta_params
    from converters.naming.meta_names import meta_parameters

    family, args = contents.family, contents.info.decoder
    meta_params(contents.info)  # raises before the copy if params.json cannot describe the model
    num_shards = 1 if options.num_shards is None else options.num_shards
    _check_num_shards(num_shards, family, args)
    parameters = meta_parameters(family, args)
    assert family.meta is not None
    dims: dict[str, int | None] = {name: p.tp_dim for name, p in parameters.items()} | dict(family.meta.shard_dims)
    _check_parts(num_shards, {name: parameters[name].shape[dim] for name, dim in dims.items() if dim is not None})
    twice = second_names(contents.view.expressions)
    shared = {name: first for name, first in twice.items() if dims[name] == dims[first]}
    return plan_meta(
        contents.tensors,
        num_shards=num_shards,
        dims=dims,
        shared=shared,
        stored=family.meta.stored(args),
        streamed=contents.streamed,
    )


def _check_parts(num_shards: int, sizes: Mapping[str, int]) -> None:
    if uneven := [f"{name}: {size:,}" for name, size in sizes.items() if size % num_shards]:
        raise ConfigError(
            f"--num-shards {num_shards} does not divide these:" + list_offenders(fold_texts(uneven)),
            hint="each shard has an equal part",
        )


def _check_num_shards(num_shards: int, family: Family, args: DecoderArgs) -> None:
    """Raise ConfigError unless each shard has whole heads and an equal part of all weights, as Meta's code needs."""
    from converters.layout.mesh_check import uneven_over_tp

    possible = [str(number) for number in NUM_SHARDS if not uneven_over_tp(family, args, number)]
    hint = f"possible for this model: {', '.join(possible)}"
    if num_shards not in NUM_SHARDS:
        raise ConfigError(f"--num-shards {num_shards}: Meta's format has 1, 2, 4, 8 or 16 shards", hint=hint)
    if uneven := uneven_over_tp(family, args, num_shards):
        raise ConfigError(f"--num-shards {num_shards} {uneven.partition(';')[0]}", hint=hint)


def _write_small_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    from converters.common.names import META_PARAMS, MODEL_INFO
    from converters.model.model_info import write_meta_params, write_model_info
    from converters.tokenizers.assets import write_assets, write_tokenizer_for_meta

    info = contents.info
    written = write_assets(folder, info.assets, info.generation)
    written += write_tokenizer_for_meta(folder, info.assets, vocab_size=info.decoder.vocab_size)
    write_meta_params(folder, info)
    write_model_info(folder, info)  # params.json has no context length and does not say that the output is tied
    return [META_PARAMS, MODEL_INFO, *written]


def second_names(expressions: Mapping[str, Expression]) -> dict[str, str]:
    """Target name → earlier target name of the same values: the output of a tied model."""
    first: dict[Expression, str] = {}
    return {
        name: first[expression]
        for name, expression in expressions.items()
        if first.setdefault(expression, name) != name
    }


META = Format(
    name="meta",
    called="an original Meta release",
    containers=("meta",),
    takes=("num_shards", "drop_expert_bias"),
    naming=_naming,
    plan=_plan,
    write_small_files=_write_small_files,
    to_dcp=CommandHelp(
        "Meta's original release to DCP.",
        "Convert Meta's original release (consolidated.NN.pth, params.json, tokenizer.model) to DCP.",
        (
            "meta-to-dcp Llama3.2-1B/original llama-1b-dcp",
            "meta-to-dcp Llama3.1-70B llama-70b-dcp --for-mesh dp_shard=8 --dry-run",
        ),
    ),
    from_dcp=CommandHelp(
        "DCP to Meta's original format.",
        "Convert DCP to Meta's original format (consolidated.NN.pth, params.json); torchtune opens a single shard.",
        (
            "dcp-to-meta outputs/checkpoint/step-1000 my-model",
            "dcp-to-meta llama-70b-dcp my-model --num-shards 8 --dtype bfloat16",
        ),
    ),
)
