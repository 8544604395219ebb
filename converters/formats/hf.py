"""A folder that transformers opens: safetensors, config.json, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from converters.common.errors import ConfigError, UnsupportedError
from converters.formats.base import CommandHelp, Contents, Format, OutputOptions

if TYPE_CHECKING:
    from converters.containers.target import Target
    from converters.families.base import Family, Naming

FUSED = "hf_fused"  # the naming with one tensor for all experts of a layer


def _naming(family: Family, options: OutputOptions) -> Naming:
    if "hf" not in family.namings:
        raise UnsupportedError(f"Hugging Face's format has no {family.name} models")
    if options.quantize:
        return _quantized_naming(family, options)
    if options.fused_experts and FUSED not in family.namings:
        has_experts = any(p.expert_dim is not None for p in family.parameters(next(iter(family.flavors.values()))))
        what = "their experts in one form only, which is fused" if has_experts else "no experts"
        raise ConfigError(f"--fused-experts: {family.name} models have {what}", hint="leave it out")
    return family.namings[FUSED if options.fused_experts else "hf"]


def _quantized_naming(family: Family, options: OutputOptions) -> Naming:
    from converters.quantized.quantization import SPELLINGS, parse_quantize

    scheme = parse_quantize(options.quantize or "")
    if scheme.method not in family.quantized_as:
        tries = [f"--quantize {text}" for text, each in SPELLINGS.items() if each.method in family.quantized_as]
        raise ConfigError(
            f"--quantize {options.quantize}: no {family.name} models are published so, and readers expect none",
            hint="" if tries else "leave it out",
            tries=tries[:1],
        )
    if options.fused_experts:
        raise ConfigError(
            "--fused-experts and --quantize cannot be combined", hint="fp8 checkpoints have one tensor per expert"
        )
    return family.namings[scheme.naming]


def _plan(contents: Contents, options: OutputOptions) -> Target:
    from converters.containers.safetensors_write import DEFAULT_SHARD_BYTES, plan_safetensors
    from converters.families.blocks import Experts

    is_dense = not any(isinstance(b.feed_forward, Experts) for b in contents.family.blocks(contents.info.args))
    if options.fused_experts and is_dense:
        raise ConfigError("--fused-experts: this model has no experts", hint="leave it out")

    return plan_safetensors(contents.tensors, shard_bytes=options.shard_bytes or DEFAULT_SHARD_BYTES)


def _write_small_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    from converters.common.box import count_dtypes
    from converters.common.names import HF_CONFIG
    from converters.families.args import DecoderArgs
    from converters.model.model_info import write_hf_config
    from converters.tokenizers.assets import write_assets, write_tokenizer_for_hf

    info = contents.info
    dtype = next(iter(count_dtypes(contents.unquantized)))
    write_hf_config(folder, info, dtype=dtype, quantization=contents.quantization)
    written = write_assets(folder, info.assets, info.generation)
    if isinstance(args := info.args, DecoderArgs):
        written += write_tokenizer_for_hf(folder, info.assets, vocab_size=args.vocab_size, max_seq_len=args.max_seq_len)
    return [HF_CONFIG, *written]


HF = Format(
    name="hf",
    called="a Hugging Face checkpoint",
    containers=("safetensors", "torch"),
    names={"hf": ""},
    takes=("shard_bytes", "quantize", "scales_from", "fused_experts", "drop_expert_bias"),
    naming=_naming,
    plan=_plan,
    write_small_files=_write_small_files,
    to_dcp=CommandHelp(
        "Hugging Face to DCP.",
        "Convert Hugging Face safetensors to DCP, for `titan train` and torchtitan.",
        (
            "hf-to-dcp Llama-3.2-1B llama-1b-dcp",
            "hf-to-dcp Llama-3.1-70B llama-70b-dcp --for-mesh dp_shard=8,tp=8 --dtype bfloat16",
            "hf-to-dcp Llama-3.1-405B llama-405b-dcp --for-mesh dp_shard=64,tp=8 --dry-run",
        ),
    ),
    from_dcp=CommandHelp(
        "DCP to Hugging Face.",
        "Convert DCP to a folder that transformers opens. Of a training checkpoint, only the weights.",
        (
            "dcp-to-hf outputs/checkpoint/step-1000 my-model",
            "dcp-to-hf torchtitan/step-1000 my-model --model-from Llama-3.1-8B --dtype bfloat16",
            "dcp-to-hf qwen3-step-1000 my-model-fp8 --quantize fp8",
        ),
    ),
)
