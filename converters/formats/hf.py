"""A folder that transformers opens as it is: safetensors, config.json, tokenizer."""

from pathlib import Path

from converters.assets import write_assets, write_tokenizer_for_hf
from converters.catalog import count_dtypes
from converters.containers.safetensors_write import DEFAULT_SHARD_BYTES, plan_safetensors
from converters.containers.target import Target
from converters.formats.base import Contents, Output, OutputOptions
from converters.model_info import write_hf_config
from converters.names import HF_CONFIG


def _plan(contents: Contents, options: OutputOptions) -> Target:
    return plan_safetensors(contents.tensors, shard_bytes=options.shard_bytes or DEFAULT_SHARD_BYTES)


def _write_small_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    info = contents.info
    written = write_assets(folder, info.assets, info.generation)
    written += write_tokenizer_for_hf(
        folder, info.assets, vocab_size=info.args.vocab_size, max_seq_len=info.args.max_seq_len
    )
    write_hf_config(folder, info, dtype=next(iter(count_dtypes(contents.tensors))))
    return [HF_CONFIG, *written]


HF = Output(
    name="hf",
    called="a Hugging Face checkpoint",
    takes=frozenset({"shard_bytes"}),
    naming=lambda family, options: family.namings["hf"],
    plan=_plan,
    write_small_files=_write_small_files,
)
