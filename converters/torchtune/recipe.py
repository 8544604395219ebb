"""torchtune.yaml: the recipe for `tune run` to fine-tune an exported checkpoint."""

import glob
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.common.errors import ConfigError, UnsupportedError, list_offenders
from converters.common.names import ASSETS_FOLDER, TORCHTUNE_RECIPE
from converters.families.args import DecoderArgs
from converters.families.parameters import Role
from converters.families.registry import get_family
from converters.families.rope import RopeScaling, describe_rope, rope_type
from converters.model.model_info import ModelInfo
from converters.torchtune.chat_file import ChatFile

VERSION = "0.6.1"  # of torchtune: the last one on PyPI
_FAMILIES = ("llama2", "llama3")
CHECKPOINTERS = {
    "hf": "torchtune.training.FullModelHFCheckpointer",
    "meta": "torchtune.training.FullModelMetaCheckpointer",
    "torchtune": "torchtune.training.FullModelTorchTuneCheckpointer",
}
_CACHED = (
    '# tiktoken caches a tokenizer.model by its path: after another one took its place, set TIKTOKEN_CACHE_DIR=""\n'
)
_MOST_TOKENS = 2048  # of a conversation; longer ones are truncated, so that the first run fits


@dataclass(frozen=True, slots=True)
class Recipe:
    """The content of a recipe. Files are in `folder`, those of the tokenizer in its assets/."""

    folder: Path  # absolute
    style: str  # one of CHECKPOINTERS
    weights: Sequence[str]
    info: ModelInfo
    tokenizer: Mapping[str, Any]  # component and files
    device: str
    chat: ChatFile


def require_family(name: str) -> None:
    """Raise UnsupportedError for families that torchtune does not have."""
    if name not in _FAMILIES:
        raise UnsupportedError(f"torchtune {VERSION} has no {name} models", hint=f"it has {', '.join(_FAMILIES)}")


def require_model(info: ModelInfo) -> None:
    """Raise UnsupportedError, with every reason, if no builder of torchtune can build this model."""
    args, scaling, problems = info.decoder, info.decoder.rope_scaling, []
    if get_family(info.family).has_role(Role.HEAD_NORM, args):
        problems.append("norms on q and k")
    if args.head_dim * args.num_heads != args.dim:
        problems.append(f"head_dim {args.head_dim}: it takes dim / heads, {args.dim} / {args.num_heads}")
    if scaling is not None and not isinstance(scaling, RopeScaling):
        problems.append(f"RoPE of type {rope_type(scaling)}: it has only llama3's")
    elif scaling is not None and scaling != RopeScaling(factor=scaling.factor):
        example = describe_rope(RopeScaling(factor=scaling.factor))
        problems.append(f"{describe_rope(scaling)}: it supports only another factor, as in {example}")
    if args.attention_bias or args.mlp_bias:
        problems.append("biases of linear layers: its builders of Llama models have none")
    if problems:
        raise UnsupportedError(f"torchtune {VERSION} cannot build this model:" + list_offenders(problems))


def require_device(device: str | None) -> None:
    """Raise ConfigError unless torchtune knows the device; its presence is checked by torchtune."""
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"--device {device}: not a device of torchtune", tries=["--device cpu", "--device cuda"])


def require_path(folder: Path) -> None:
    """Raise ConfigError if a recipe cannot contain the path `folder`: its readers would interpret it."""
    if "${" in str(folder) or "::" in str(folder) or not str(folder).isprintable():
        raise ConfigError(
            f"{str(folder)!r}: torchtune cannot read this path",
            hint="it must not contain `${`, `::` or unprintable characters",
        )


def recipe_text(recipe: Recipe) -> str:
    """The YAML of the recipe."""
    folder, cuda = recipe.folder, recipe.device != "cpu"
    batch_size = min(2, recipe.chat.num_conversations)  # torchtune drops a batch that is not full
    seq_len = min(_MOST_TOKENS, recipe.info.decoder.max_seq_len)
    return f"""\
# Fine-tunes the checkpoint in this folder with torchtune {VERSION}:
#
#   tune run full_finetune_single_device --config {shlex.quote(str(folder / TORCHTUNE_RECIPE))}
#
# Every value can also be given on that command line, as in `epochs=3 optimizer.lr=1e-5`.
# Paths are absolute: if you move the folder, change them.

output_dir: {_yaml(f"{folder}-finetuned")}  # epoch_0, epoch_1, …: titan reads each of them

checkpointer:
  _component_: {CHECKPOINTERS[recipe.style]}
  checkpoint_dir: {_yaml(f"{folder / ASSETS_FOLDER}")}  # copied into every epoch
  checkpoint_files:
{_list(f"../{name}" for name in recipe.weights)}
  model_type: {_model_type(recipe.info)}
  output_dir: ${{output_dir}}
# To go on with a run that was cut off: true, and as checkpoint_files those of its newest epoch, such as
# {_resume(recipe)}
resume_from_checkpoint: false

model:
{_section(_model(recipe.info))}

{_CACHED if "llama3" in recipe.tokenizer["_component_"] else ""}tokenizer:
{_section(recipe.tokenizer)}
  max_seq_len: {seq_len}  # tokens; longer conversations are cut

dataset:
  _component_: torchtune.datasets.chat_dataset
  source: json
  data_files: {_yaml(glob.escape(f"{folder / recipe.chat.name}"))}
  split: train
  conversation_column: messages
  conversation_style: openai
  packed: false
seed: 42
shuffle: true

batch_size: {batch_size}
gradient_accumulation_steps: 1
epochs: 1
max_steps_per_epoch: null
optimizer:
  _component_: torch.optim.AdamW
  lr: 2.0e-05
  fused: {_yaml(cuda)}
optimizer_in_bwd: false  # true needs less memory, and gradient_accumulation_steps 1
clip_grad_norm: null
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
compile: false

device: {recipe.device}
dtype: {"bf16" if cuda else "fp32"}
enable_activation_checkpointing: {_yaml(cuda)}
enable_activation_offloading: false

metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${{output_dir}}/logs
log_every_n_steps: 1
log_peak_memory_stats: {_yaml(cuda)}
"""


def _model(info: ModelInfo) -> dict[str, Any]:
    args = info.decoder
    return {
        "_component_": _builder(info),
        "vocab_size": args.vocab_size,
        "num_layers": args.num_layers,
        "num_heads": args.num_heads,
        "num_kv_heads": args.num_kv_heads,
        "embed_dim": args.dim,
        "intermediate_dim": args.ffn_hidden,
        "max_seq_len": args.max_seq_len,
        "rope_base": args.rope_theta,
        "norm_eps": args.norm_eps,
        **_scale_factor(args),
    }


def _builder(info: ModelInfo) -> str:
    """The builder; they differ only in RoPE and tying, so the numbers determine it."""
    if info.decoder.tied:
        return "torchtune.models.llama3_2.llama3_2"
    if info.decoder.rope_scaling is not None:
        return "torchtune.models.llama3_1.llama3_1"
    return f"torchtune.models.{info.family}.{info.family}"


def _scale_factor(args: DecoderArgs) -> dict[str, float]:
    if args.rope_scaling is not None:
        return {"scale_factor": args.rope_scaling.factor}
    return {"scale_factor": 1} if args.tied else {}  # its builder of tied models always scales


def _resume(recipe: Recipe) -> str:
    """The file that torchtune writes in the first epoch, relative to output_dir."""
    suffix = "safetensors" if recipe.style == "hf" else "bin"
    return f"epoch_0/model-00001-of-{len(recipe.weights):05}.{suffix}"


def _model_type(info: ModelInfo) -> str:
    """The model_type, by which the checkpointers recognize a tied model; they treat all Llamas alike otherwise."""
    return "LLAMA3_2" if info.decoder.tied else info.family.upper()


def _section(values: Mapping[str, Any]) -> str:
    return "\n".join(f"  {key}: {_yaml(value)}" for key, value in values.items())


def _list(values: Iterable[str]) -> str:
    return "\n".join(f"    - {_yaml(value)}" for value in values)


def _yaml(value: Any) -> str:
    """A scalar for every YAML reader: 1.0e-05, because some read 1e-05 as text."""
    if isinstance(value, float):
        text = repr(int(value)) if value.is_integer() else repr(value)
        mantissa, e, exponent = text.partition("e")
        return text if not e or "." in mantissa else f"{mantissa}.0e{exponent}"
    if isinstance(value, str) and all(part.isidentifier() for part in value.split(".")):
        return value  # a component
    return json.dumps(value, ensure_ascii=False)
