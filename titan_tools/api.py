"""Public Python API of the tools: load a model for inference, estimate GPU memory, download, list models.

Importing it does not import torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titan_tools.launch.launch import Launch, Rendezvous

if TYPE_CHECKING:
    from converters.store.location import Place
    from titan_tools.hub.download import DownloadReport
    from titan_tools.infer.generator import Generator
    from titan_tools.memory.estimate import Estimate
    from titan_tools.memory.replay.allocator import AllocatorName

__all__ = ["Launch", "Rendezvous", "download", "estimate", "list_models", "load_for_inference"]


def load_for_inference(
    checkpoint: "Place",
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    quantize: Literal["int8", "float8", "stored"] | None = None,
    compile: bool = False,
    context: int | None = None,
    select: str | None = None,
    model_from: "Place | None" = None,
) -> "Generator":
    """Load a checkpoint of any format for generation in this process.

    Args:
        checkpoint: as for `titan infer`; of a run folder the newest complete step.
        dtype: of the computation; default: the checkpoint's own.
        device: default: the GPU if there is one, else the CPU.
        quantize: round the weights of linear layers and experts to 8 bits; "stored": keep a checkpoint's own float8 or
            mxfp4 weights.
        compile: compile the decode step.
        context: length of the longest sequence; default: the model's context, at most 8192.
        select: the model, if the checkpoint holds several.
        model_from: folder with the model's config and tokenizer, for a checkpoint that does not have them.

    The result has `generate`, `score`, `encode` and `decode`.

    >>> model = load_for_inference("my-model")
    >>> completion = model.generate("def main(", max_new_tokens=4)
    >>> len(completion.tokens), completion.finish_reason
    (4, 'length')
    >>> model.generate(model.encode("def main("), max_new_tokens=4).text == completion.text
    True
    """
    from converters.store.hub_names import find_local
    from titan_tools.infer.decoding.sampling import Sampling
    from titan_tools.infer.generator import load_generator
    from titan_tools.infer.request import Request

    request = Request(
        find_local(checkpoint),
        Sampling(),
        tp=1,
        dtype=dtype,
        quantize=quantize,
        compile=compile,
        select=select,
        model_from=None if model_from is None else find_local(model_from),
    )
    return load_generator(request, device=device, context=context)


def estimate(
    config: Path | str,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    gpu: str | None = None,
    allocator: "AllocatorName | None" = None,
    imbalance: float | None = None,
) -> "Estimate":
    """Estimate the peak GPU memory of a training run. No GPU is needed.

    Args:
        config: TOML file or preset; `overrides` are typed as on the command line.
        world_size: number of ranks; None: as many as the degrees of the config need.
        gpu: a GPU type such as `"h100-80"`, or usable GiB; None judges all known types.
        allocator: `"classic"` or `"expandable"`; None: that of PYTORCH_ALLOC_CONF, else expandable.
        imbalance: with expert parallelism, the rows that experts of the fullest rank receive over the mean of all
            ranks, in the verdicts; None: 1.5.

    Raises ConfigError for a layout or GPU type that cannot run it, UnsupportedError for features that are not covered.

    >>> found = estimate("debug", world_size=8, gpu="h100-80")
    >>> found.verdicts[0].verdict, found.fullest_rank.pp_rank
    ('fits', 0)
    """
    from converters.common.errors import ConfigError, UnsupportedError, list_offenders
    from titan_tools.memory.allocator_settings import allocator_of_environment
    from titan_tools.memory.command import find_gpu, gpu_problems
    from titan_tools.memory.estimate import estimate as _estimate
    from titan_tools.memory.imbalance import JUDGED_IMBALANCE, imbalance_problems
    from titan_tools.memory.trace.coverage import trace_gaps
    from trainer.config.load import load_config
    from trainer.job.job import resolve_job

    settings, gpu_type = load_config(config, overrides), None if gpu is None else find_gpu(gpu)
    if problems := gpu_problems(settings, gpu_type):
        raise ConfigError(problems[0])
    job = resolve_job(settings, world_size)
    if problems := imbalance_problems(job, imbalance):
        raise ConfigError(problems[0])
    if gaps := trace_gaps(settings, job.dims):
        raise UnsupportedError("not covered by the estimate:" + list_offenders([gap.reason for gap in gaps], most=50))
    return _estimate(
        job,
        gpu=gpu_type,
        allocator=allocator or allocator_of_environment(),
        imbalance=JUDGED_IMBALANCE if imbalance is None else imbalance,
    )


def download(
    repository: str,
    dst: Path | str | None = None,
    *,
    revision: str = "main",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    assets: Sequence[str] = (),
    token: str | None = None,
    dry_run: bool = False,
) -> "DownloadReport":
    """Download a model from the Hugging Face hub into the HF cache or, with `dst`, into a folder.

    Resumes an interrupted download and checks every file against the hub's checksum. `include` and `exclude` are file
    name patterns, and `assets` kinds of files: `"tokenizer"`, `"config"`, `"index"`, `"safetensors"`. By default one
    set of weights, the configs and the tokenizer are downloaded.

    >>> report = download("meta-llama/Llama-3.2-1B", "llama-1b")  # doctest: +SKIP
    """
    from titan_tools.hub.download import FileSelection
    from titan_tools.hub.download import download as _download

    return _download(
        repository,
        None if dst is None else Path(dst),
        revision=revision,
        selection=FileSelection(include, exclude, assets=assets),
        token=token,
        dry_run=dry_run,
    )


def list_models() -> list[dict[str, Any]]:
    """List the model families, with their flavors, sizes, and the commands and formats that take them.

    >>> [family["family"] for family in list_models()][:3]
    ['llama3', 'llama2', 'qwen3']
    """
    from titan_tools.model_list import list_models as _list_models

    return _list_models()
