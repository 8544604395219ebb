"""A folder that torchtune's own recipes start from: weights, tokenizer, a chat file and a recipe that runs as it is.

torchtune copies everything in its `checkpoint_dir`, weights aside, into each epoch that it saves. That must not be our
manifest, which vouches for other weights. So `checkpoint_dir` is assets/, with what an epoch needs to be read again,
and the weights lie beside it.
"""

import shutil
from pathlib import Path

from converters.assets import write_assets, write_tokenizer_for_hf
from converters.catalog import count_dtypes
from converters.containers.safetensors_write import DEFAULT_SHARD_BYTES, plan_safetensors
from converters.containers.target import Target
from converters.containers.torch_write import plan_torch
from converters.errors import ConfigError
from converters.families.base import Family, Naming
from converters.formats.base import Contents, Output, OutputOptions
from converters.formats.meta import second_names
from converters.model_info import meta_params, write_hf_config, write_meta_params, write_model_info
from converters.names import (
    ASSETS_FOLDER,
    HF_CONFIG,
    META_PARAMS,
    META_SHARD,
    MODEL_INFO,
    TORCH_MODEL,
    TORCHTUNE_RECIPE,
)
from converters.torchtune.chat_file import check_chat_file, write_sample
from converters.torchtune.recipe import (
    CHECKPOINTERS,
    Recipe,
    recipe_text,
    require_device,
    require_family,
    require_model,
    require_path,
)
from converters.torchtune.tokenizer import find_tokenizer

_ONE_FILE = {"meta": META_SHARD.format(index=0), "torchtune": TORCH_MODEL}  # checkpointers that read just one
_STYLES = [f"--style {style}" for style in CHECKPOINTERS]


def _style(options: OutputOptions) -> str:
    return options.style or "hf"


def _place(contents: Contents) -> Path:
    """Where the folder will lie, without `..` and links in the way."""
    return contents.dst.parent.resolve() / contents.dst.name


def _naming(family: Family, options: OutputOptions) -> Naming:
    if _style(options) not in CHECKPOINTERS:
        raise ConfigError(f"--style {options.style}: torchtune has no such checkpoints", tries=_STYLES)
    require_family(family.name)
    return family.namings[_style(options)]


def _plan(contents: Contents, options: OutputOptions) -> Target:
    info, style = contents.info, _style(options)
    require_model(info)
    require_device(options.device)
    require_path(_place(contents))
    find_tokenizer(info)
    check_chat_file(options.dataset)
    if style == "hf":
        return plan_safetensors(contents.tensors, shard_bytes=options.shard_bytes or DEFAULT_SHARD_BYTES)
    if options.shard_bytes is not None:
        raise ConfigError(f"--shard-size means nothing for --style {style}, which is one file", tries=_STYLES[:1])
    if style == "meta":
        meta_params(info)  # raises now where params.json cannot say it, not after the copy
    return plan_torch(contents.tensors, file=_ONE_FILE[style], shared=second_names(contents.view.ledger.used))


def _write_small_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    info, style, dst = contents.info, _style(options), _place(contents)
    tokenizer, assets = find_tokenizer(info), folder / ASSETS_FOLDER
    in_assets = write_assets(assets, info.assets, info.generation) + tokenizer.write(assets)
    if style == "hf":
        in_assets += write_tokenizer_for_hf(
            assets, info.assets, vocab_size=info.args.vocab_size, max_seq_len=info.args.max_seq_len
        )
    telling = _write_telling_files(folder, contents, style)
    for name in telling:
        shutil.copyfile(folder / name, assets / name)
    chat = check_chat_file(options.dataset)
    if options.dataset is None:
        write_sample(folder / chat.name)
    else:
        shutil.copyfile(options.dataset, folder / chat.name)
    recipe = Recipe(
        folder=dst,
        style=style,
        weights=[_ONE_FILE[style]] if style in _ONE_FILE else sorted(p.name for p in folder.glob("*.safetensors")),
        info=info,
        tokenizer=tokenizer.section(dst / ASSETS_FOLDER),
        device=options.device or default_device(),
        chat=chat,
    )
    (folder / TORCHTUNE_RECIPE).write_text(recipe_text(recipe), encoding="utf-8")
    return [TORCHTUNE_RECIPE, chat.name, *telling, *(f"{ASSETS_FOLDER}/{name}" for name in [*in_assets, *telling])]


def _write_telling_files(folder: Path, contents: Contents, style: str) -> list[str]:
    """The files that say what the weights are; torchtune itself reads config.json. Returns their names."""
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
    return "cuda" if any(devices.glob("nvidia[0-9]*")) else "cpu"


TORCHTUNE = Output(
    name="torchtune",
    called="a folder for torchtune",
    takes=frozenset({"shard_bytes", "style", "device", "dataset"}),
    naming=_naming,
    plan=_plan,
    write_small_files=_write_small_files,
)
