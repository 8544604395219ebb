"""A folder that torchtune's recipes start from: weights, tokenizer, a chat file and a ready recipe.

torchtune copies everything in its `checkpoint_dir` but the weights into each epoch that it saves. Our manifest must not
be among it, because it describes other weights. So `checkpoint_dir` is assets/, with what is needed to read an epoch
again, and the weights are in the folder above.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from converters.common.errors import ConfigError
from converters.common.names import (
    ASSETS_FOLDER,
    HF_CONFIG,
    META_PARAMS,
    META_SHARD,
    MODEL_INFO,
    TORCH_MODEL,
    TORCHTUNE_RECIPE,
)
from converters.formats.base import CommandHelp, Contents, Format, OutputOptions
from converters.formats.meta import second_names

if TYPE_CHECKING:
    from converters.containers.target import Target
    from converters.families.base import Family, Naming

_TAKEN = "the source has {}'s names, which torchtune's checkpointers read and write, too"
_ONE_FILE = {"meta": META_SHARD.format(index=0), "torchtune": TORCH_MODEL}  # checkpointers that read just one


def _style(options: OutputOptions) -> str:
    return options.style or "hf"


def _absolute_dst(contents: Contents) -> Path:
    """The path of the output, without `..` and links."""
    return (contents.dst.parent.resolved() / contents.dst.name).path


def _naming(family: Family, options: OutputOptions) -> Naming:
    from converters.torchtune.recipe import CHECKPOINTERS, require_family

    if _style(options) not in CHECKPOINTERS:
        tries = [f"--style {style}" for style in CHECKPOINTERS]
        raise ConfigError(f"--style {options.style}: torchtune has no such checkpoints", tries=tries)
    require_family(family.name)
    return family.namings[_style(options)]


def _plan(contents: Contents, options: OutputOptions) -> Target:
    from converters.containers.safetensors_write import DEFAULT_SHARD_BYTES, plan_safetensors
    from converters.containers.torch_write import plan_torch
    from converters.model.model_info import meta_params
    from converters.torchtune.chat_file import check_chat_file
    from converters.torchtune.recipe import require_device, require_model, require_path
    from converters.torchtune.tokenizer import find_tokenizer

    info, style = contents.info, _style(options)
    require_model(info)
    require_device(options.device)
    require_path(_absolute_dst(contents))
    find_tokenizer(info)
    check_chat_file(options.dataset)
    if style == "hf":
        return plan_safetensors(contents.tensors, shard_bytes=options.shard_bytes or DEFAULT_SHARD_BYTES)
    if options.shard_bytes is not None:
        raise ConfigError(f"--shard-size is not supported by --style {style}, which is one file", tries=["--style hf"])
    if style == "meta":
        meta_params(info)  # raises before the copy if params.json cannot describe the model
    shared = second_names(contents.view.expressions)
    return plan_torch(contents.tensors, file=_ONE_FILE[style], shared=shared, streamed=contents.streamed)


def _write_small_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    from converters.store.local_files import copy_file, write_text
    from converters.tokenizers.assets import write_assets, write_tokenizer_for_hf
    from converters.torchtune.chat_file import check_chat_file, write_sample
    from converters.torchtune.recipe import Recipe, recipe_text
    from converters.torchtune.tokenizer import find_tokenizer

    info, style, dst = contents.info, _style(options), _absolute_dst(contents)
    tokenizer, assets = find_tokenizer(info), folder / ASSETS_FOLDER
    in_assets = write_assets(assets, info.assets, info.generation) + tokenizer.write(assets)
    if style == "hf":
        in_assets += write_tokenizer_for_hf(
            assets, info.assets, vocab_size=info.decoder.vocab_size, max_seq_len=info.decoder.max_seq_len
        )
    model_files = _write_model_files(folder, contents, style)
    for name in model_files:
        copy_file(folder / name, assets / name)
    chat = check_chat_file(options.dataset)
    if options.dataset is None:
        write_sample(folder / chat.name)
    else:
        copy_file(options.dataset, folder / chat.name)
    recipe = Recipe(
        folder=dst,
        style=style,
        weights=[_ONE_FILE[style]] if style in _ONE_FILE else _weight_files(contents, options),
        info=info,
        tokenizer=tokenizer.section(dst / ASSETS_FOLDER),
        device=options.device or default_device(),
        chat=chat,
    )
    write_text(folder / TORCHTUNE_RECIPE, recipe_text(recipe))
    return [
        TORCHTUNE_RECIPE,
        chat.name,
        *model_files,
        *(f"{ASSETS_FOLDER}/{name}" for name in [*in_assets, *model_files]),
    ]


def _weight_files(contents: Contents, options: OutputOptions) -> list[str]:
    return sorted(name for name in _plan(contents, options).file_bytes if name.endswith(".safetensors"))


def _write_model_files(folder: Path, contents: Contents, style: str) -> list[str]:
    """Write the files that describe the model; torchtune itself reads config.json. Returns their names."""
    from converters.common.box import count_dtypes
    from converters.model.model_info import write_hf_config, write_meta_params, write_model_info

    if style == "hf":
        write_hf_config(folder, contents.info, dtype=next(iter(count_dtypes(contents.tensors))))
        return [HF_CONFIG]
    write_model_info(folder, contents.info)
    if style == "meta":
        write_meta_params(folder, contents.info)
        return [MODEL_INFO, META_PARAMS]
    return [MODEL_INFO]


def default_device(devices: Path = Path("/dev")) -> str:
    """`cuda` on a machine with an NVIDIA GPU, as its driver shows it, else `cpu`."""
    from converters.store.local_files import names_in

    return "cuda" if any(re.match(r"nvidia\d", name) for name in names_in(devices)) else "cpu"


TORCHTUNE = Format(
    name="torchtune",
    called="a torchtune checkpoint",
    containers=("safetensors", "torch", "meta"),  # of its checkpointers, each with its own names
    names={"torchtune": "", "hf": _TAKEN.format("Hugging Face"), "meta": _TAKEN.format("Meta")},
    takes=("style", "device", "dataset", "shard_bytes"),
    naming=_naming,
    plan=_plan,
    write_small_files=_write_small_files,
    to_dcp=CommandHelp(
        "A torchtune checkpoint to DCP.",
        "Convert a checkpoint that torchtune has fine-tuned to DCP, whichever of its checkpointers wrote it.",
        (
            "torchtune-to-dcp my-model-finetuned/epoch_0 tuned-dcp",
            "torchtune-to-dcp epoch_0/model.pt tuned-dcp --model-from Llama-3.1-8B",
        ),
    ),
    from_dcp=CommandHelp(
        "DCP to a folder that torchtune fine-tunes.",
        "Convert DCP to a folder that torchtune's recipes start from: weights, tokenizer and a recipe, torchtune.yaml.",
        (
            "dcp-to-torchtune outputs/checkpoint/step-1000 my-model",
            "dcp-to-torchtune llama-1b-dcp my-model --style torchtune --device cpu --dataset chats.jsonl",
        ),
    ),
)
