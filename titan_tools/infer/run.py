"""`titan infer` from checkpoint to text: look for everything that can be wrong, start ranks, load, generate, report."""

import os
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer

from converters.errors import ConfigError
from converters.source_check import check_read_files
from converters.weights import NativeWeights, open_native
from titan_tools.console import note
from titan_tools.infer.find import find_checkpoint
from titan_tools.infer.generate import complete
from titan_tools.infer.load import SlicedModel, load_model
from titan_tools.infer.prompts import Prompt, encode_prompt, new_tokens_that_fit
from titan_tools.infer.report import report
from titan_tools.infer.sampling import Sampling, check_sampling
from titan_tools.infer.slices import check_tp
from titan_tools.infer.vocabulary import Vocabulary, read_vocabulary
from titan_tools.launch import inside_launch, rank_errors, run_ranks, started_by_titan

# A rank that is gone shows at once, because its connections close; this is for one that hangs.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for. None: `tp` is the launch's size or 1, `max_new_tokens` what fits, `dtype` as stored."""

    checkpoint: Path
    prompt: str
    sampling: Sampling
    tp: int | None = None
    max_new_tokens: int | None = None
    dtype: str | None = None
    model_from: Path | None = None  # a folder that says what the model is and has its tokenizer
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class _Work:
    """A request that was found to be possible."""

    prompt: Prompt
    vocabulary: Vocabulary
    max_new_tokens: int
    dtype: str
    tp: int


def infer(request: Request) -> dict[str, Any] | None:
    """Generate; returns the report, or None where another process has it (ranks started here, or the first rank)."""
    with rank_errors():
        check_sampling(request.sampling)
        checkpoint = find_checkpoint(request.checkpoint)
        with open_native(checkpoint, model_from=request.model_from) as weights:
            work = _check(request, checkpoint, weights)
            if _looks_for_all():
                check_read_files(weights.catalog, weights.source.ledger.used.values())
            model = _load(work, weights) if work.tp == 1 or inside_launch() else None
        if model is not None:
            return _generate(request, work, model)
    _start_ranks(request, checkpoint, work)
    return None


def _check(request: Request, checkpoint: Path, weights: NativeWeights) -> _Work:
    """Everything that headers, tokenizer and numbers can tell, before ranks start and weights are read."""
    args = weights.info.args
    tp = _degree(request.tp)
    check_tp(args, tp)
    _check_devices(tp)
    check_sampling(request.sampling, vocab_size=args.vocab_size)
    vocabulary = read_vocabulary(request.model_from or weights.catalog.root, weights.info)
    prompt = encode_prompt(request.prompt, vocabulary.tokenizer)
    num_new = new_tokens_that_fit(prompt, max_new_tokens=request.max_new_tokens, context=args.max_seq_len)
    stored = weights.source.tensors["tok_embeddings.weight"].dtype
    dtype = request.dtype or (stored if stored in ("float32", "bfloat16") else "float32")
    if checkpoint != request.checkpoint:
        note(f"reading {checkpoint}")
    return _Work(prompt, vocabulary, num_new, dtype, tp)


def _looks_for_all() -> bool:
    """Whether this process is the one that reads every file for damage: the first, and before it starts others."""
    return not inside_launch() or (os.environ["RANK"] == "0" and not started_by_titan())


def _degree(asked: int | None) -> int:
    """The tp degree: what was asked for, which inside a launch must be the launch's size."""
    if not inside_launch():
        return asked or 1
    world_size = int(os.environ["WORLD_SIZE"])
    if asked not in (None, world_size):
        raise ConfigError(
            f"--tp is {asked}, but the launcher started {world_size} ranks",
            tries=[f"--tp {world_size}", f"titan infer … --tp {asked} without torchrun"],
        )
    return world_size


def _check_devices(tp: int) -> None:
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", tp))
    if torch.cuda.is_available() and num_local > torch.cuda.device_count():
        raise ConfigError(
            f"--tp {tp} needs {num_local} GPUs on this machine, which has {torch.cuda.device_count()}",
            tries=["CUDA_VISIBLE_DEVICES= titan infer …, to run on the CPU"],
        )


def _start_ranks(request: Request, checkpoint: Path, work: _Work) -> None:
    """The same command once per rank, on the very step that was found here; the prompt travels in a file."""
    with tempfile.TemporaryDirectory(prefix="titan-infer-") as folder:
        prompt_file = Path(folder) / "prompt.txt"
        prompt_file.write_bytes(request.prompt.encode())
        sampling = request.sampling
        options = {
            "--tp": work.tp,
            "--prompt-file": prompt_file,
            "--max-new-tokens": work.max_new_tokens,
            "--temperature": sampling.temperature,
            "--top-k": sampling.top_k,
            "--top-p": sampling.top_p,
            "--seed": sampling.seed,
            "--dtype": work.dtype,
            "--model-from": request.model_from,
        }
        argv = ["infer", *(["--json"] if request.as_json else [])]
        argv += [f"{name}={value}" for name, value in options.items() if value is not None]
        exit_code = run_ranks([*argv, "--", str(checkpoint)], nproc=work.tp)
    if exit_code:  # no rank had anything to tell: they were stopped from outside
        raise typer.Exit(_INTERRUPTED if exit_code < 0 else exit_code)


def _load(work: _Work, weights: NativeWeights) -> SlicedModel:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dtype, rank = getattr(torch, work.dtype), int(os.environ["RANK"]) if work.tp > 1 else 0
    return load_model(weights.source, weights.info, dtype=dtype, device=device, tp=work.tp, rank=rank)


def _generate(request: Request, work: _Work, model: SlicedModel) -> dict[str, Any] | None:
    """Generate, and report on the first rank."""
    if work.tp > 1:
        on_gpu = model.device.type == "cuda"
        backend, device_id = ("nccl", model.device) if on_gpu else ("gloo", None)
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device_id)
    completion = complete(
        model,
        work.prompt,
        max_new_tokens=work.max_new_tokens,
        sampling=request.sampling,
        stop_ids=work.vocabulary.stop_ids,
    )
    seed = request.sampling.seed
    told = report([completion], work.vocabulary, tp=work.tp, dtype=work.dtype, seed=seed, device=model.device)
    if work.tp == 1:
        return told
    is_first = dist.get_rank() == 0
    # Not in a `finally`: after an error a peer may be gone, and tearing down a group with a dead peer can hang.
    dist.destroy_process_group()
    return told if is_first else None
