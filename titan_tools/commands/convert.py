"""titan convert: the same weights in another format."""

import typer

from titan_tools.commands.convert_options import (
    DEFAULT_WORKERS,
    AllowExtra,
    AllowMissing,
    AllowNonfinite,
    Dataset,
    Destination,
    Device,
    DryRun,
    DType,
    FileOrFolder,
    FolderOfAny,
    ForMesh,
    Json,
    ModelFrom,
    NoDigest,
    NumShards,
    Overwrite,
    Resume,
    ShardSize,
    Source,
    To,
    TorchtuneStyle,
    Workers,
)
from titan_tools.conversion import run

convert_app = typer.Typer(
    help="Convert weights between Hugging Face, DCP, Meta's format, torch files and torchtune, at the speed and in the "
    "memory of a copy.\n\n"
    "\b\nExamples:\n"
    "  titan convert auto Llama-3.2-1B out.dcp --to dcp\n"
    "  titan convert dcp-to-hf outputs/checkpoint/step-1000 my-model\n"
    "  titan help convert auto",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# `run` takes every option by the name it has here: at the first line of a function, locals() is just its parameters.


@convert_app.command("hf-to-dcp", short_help="Hugging Face to DCP.")
def hf_to_dcp(
    src: Source,
    dst: Destination,
    for_mesh: ForMesh = None,
    shard_size: ShardSize = None,
    model_from: ModelFrom = None,
    dtype: DType = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: AllowMissing = False,
    allow_extra: AllowExtra = False,
    allow_nonfinite: AllowNonfinite = False,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Hugging Face safetensors to DCP, ready for `titan train` and torchtitan.

    \b
    Examples:
      titan convert hf-to-dcp Llama-3.2-1B llama-1b-dcp
      titan convert hf-to-dcp Llama-3.1-70B llama-70b-dcp --for-mesh dp_shard=8,tp=8 --dtype bfloat16
      titan convert hf-to-dcp Llama-3.1-405B llama-405b-dcp --for-mesh dp_shard=64,tp=8 --dry-run
    """
    run(source="hf", to="dcp", **locals())


@convert_app.command("dcp-to-hf", short_help="DCP to Hugging Face.")
def dcp_to_hf(
    src: Source,
    dst: Destination,
    shard_size: ShardSize = None,
    model_from: ModelFrom = None,
    dtype: DType = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: AllowMissing = False,
    allow_extra: AllowExtra = False,
    allow_nonfinite: AllowNonfinite = False,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """DCP to a folder that transformers opens as it is. Of a training checkpoint, the weights.

    \b
    Examples:
      titan convert dcp-to-hf outputs/checkpoint/step-1000 my-model
      titan convert dcp-to-hf torchtitan/step-1000 my-model --model-from Llama-3.1-8B --dtype bfloat16
    """
    run(source="dcp", to="hf", **locals())


@convert_app.command("meta-to-dcp", short_help="Meta's original release to DCP.")
def meta_to_dcp(
    src: Source,
    dst: Destination,
    for_mesh: ForMesh = None,
    shard_size: ShardSize = None,
    model_from: ModelFrom = None,
    dtype: DType = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: AllowMissing = False,
    allow_extra: AllowExtra = False,
    allow_nonfinite: AllowNonfinite = False,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Meta's original release (consolidated.NN.pth, params.json, tokenizer.model) to DCP.

    \b
    Examples:
      titan convert meta-to-dcp Llama3.2-1B/original llama-1b-dcp
      titan convert meta-to-dcp Llama3.1-70B llama-70b-dcp --for-mesh dp_shard=8 --dry-run
    """
    run(source="meta", to="dcp", **locals())


@convert_app.command("dcp-to-meta", short_help="DCP to Meta's original format.")
def dcp_to_meta(
    src: Source,
    dst: Destination,
    num_shards: NumShards = None,
    model_from: ModelFrom = None,
    dtype: DType = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: AllowMissing = False,
    allow_extra: AllowExtra = False,
    allow_nonfinite: AllowNonfinite = False,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """DCP to Meta's original format (consolidated.NN.pth, params.json); torchtune opens one of a single shard.

    \b
    Examples:
      titan convert dcp-to-meta outputs/checkpoint/step-1000 my-model
      titan convert dcp-to-meta llama-70b-dcp my-model --num-shards 8 --dtype bfloat16
    """
    run(source="dcp", to="meta", **locals())


@convert_app.command("torch-to-dcp", short_help="A torch.save file to DCP.")
def torch_to_dcp(
    src: Source,
    dst: Destination,
    for_mesh: ForMesh = None,
    shard_size: ShardSize = None,
    model_from: ModelFrom = None,
    dtype: DType = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: AllowMissing = False,
    allow_extra: AllowExtra = False,
    allow_nonfinite: AllowNonfinite = False,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """A torch.save file (.pt, .pth, .bin) to DCP; of a training checkpoint in one, the model part.

    Native, Hugging Face, Meta and torchtune names are recognised.

    \b
    Examples:
      titan convert torch-to-dcp checkpoint.pt llama-dcp --model-from Llama-3.1-8B
      titan convert torch-to-dcp pytorch_model_folder llama-dcp --for-mesh dp_shard=8
    """
    run(source="torch", to="dcp", **locals())


@convert_app.command("dcp-to-torch", short_help="DCP to a torch.save file.")
def dcp_to_torch(
    src: Source,
    dst: FileOrFolder,
    model_from: ModelFrom = None,
    dtype: DType = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: AllowMissing = False,
    allow_extra: AllowExtra = False,
    allow_nonfinite: AllowNonfinite = False,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """DCP to one torch.save file with the weights under their native names, for torch.load.

    A DST that ends in .pt, .pth or .bin is that very file. Any other is a folder: model.pt, what model it is,
    tokenizer, manifest.

    \b
    Examples:
      titan convert dcp-to-torch outputs/checkpoint/step-1000 my-model.pt
      titan convert dcp-to-torch outputs/checkpoint/step-1000 my-model --dtype bfloat16
    """
    run(source="dcp", to="torch", **locals())


@convert_app.command("torchtune-to-dcp", short_help="What torchtune has fine-tuned to DCP.")
def torchtune_to_dcp(
    src: Source,
    dst: Destination,
    for_mesh: ForMesh = None,
    shard_size: ShardSize = None,
    model_from: ModelFrom = None,
    dtype: DType = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: AllowMissing = False,
    allow_extra: AllowExtra = False,
    allow_nonfinite: AllowNonfinite = False,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """What torchtune has fine-tuned to DCP, whichever of its checkpointers wrote it.

    \b
    Examples:
      titan convert torchtune-to-dcp my-model-finetuned/epoch_0 tuned-dcp
      titan convert torchtune-to-dcp epoch_0/model.pt tuned-dcp --model-from Llama-3.1-8B
    """
    run(source="torchtune", to="dcp", **locals())


@convert_app.command("dcp-to-torchtune", short_help="DCP to a folder that torchtune fine-tunes.")
def dcp_to_torchtune(
    src: Source,
    dst: Destination,
    style: TorchtuneStyle = None,
    device: Device = None,
    dataset: Dataset = None,
    shard_size: ShardSize = None,
    model_from: ModelFrom = None,
    dtype: DType = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: AllowMissing = False,
    allow_extra: AllowExtra = False,
    allow_nonfinite: AllowNonfinite = False,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """DCP to a folder that torchtune's recipes start from: weights, tokenizer and a ready recipe, torchtune.yaml.

    \b
    Examples:
      titan convert dcp-to-torchtune outputs/checkpoint/step-1000 my-model
      titan convert dcp-to-torchtune llama-1b-dcp my-model --style torchtune --device cpu --dataset chats.jsonl
    """
    run(source="dcp", to="torchtune", **locals())


@convert_app.command("auto", short_help="Whatever it is, to any format.")
def auto(
    src: Source,
    dst: FolderOfAny,
    to: To,
    for_mesh: ForMesh = None,
    shard_size: ShardSize = None,
    num_shards: NumShards = None,
    style: TorchtuneStyle = None,
    device: Device = None,
    dataset: Dataset = None,
    model_from: ModelFrom = None,
    dtype: DType = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: AllowMissing = False,
    allow_extra: AllowExtra = False,
    allow_nonfinite: AllowNonfinite = False,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Whatever SRC is, to any format. Also reads torchtitan's other layouts and torch files of anybody's names.

    \b
    Examples:
      titan convert auto Llama3.2-1B/original my-model --to hf
      titan convert auto checkpoint.pt llama-dcp --to dcp --model-from Llama-3.1-8B
      titan convert auto Llama-3.1-8B llama-8b.pt --to torch
    """
    run(source=None, **locals())
