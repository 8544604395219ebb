"""`titan infer` from checkpoint to text: look for everything that can be wrong, start ranks, load, do the task."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import typer

from converters.errors import CheckpointError
from converters.source_check import check_read_files
from converters.weights import NativeWeights, open_native
from titan_tools.console import note
from titan_tools.infer.decoding.compiled import check_compiler
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.logprobs import check_logprobs
from titan_tools.infer.decoding.sampling import check_sampling
from titan_tools.infer.find import find_checkpoints, find_model_place, find_tokenizer
from titan_tools.infer.model.load import SlicedModel, load_model
from titan_tools.infer.model.quantize import why_slow
from titan_tools.infer.model.shared_memory import sum_in_shared_memory
from titan_tools.infer.model.slices import check_tp
from titan_tools.infer.options import check_options
from titan_tools.infer.ranks import Ranks, check_devices, degree, joined, own_device
from titan_tools.infer.request import Request, save_request
from titan_tools.infer.task import Task, Work
from titan_tools.infer.tasks.batch import prepare_batch
from titan_tools.infer.tasks.chat import prepare_chat
from titan_tools.infer.tasks.say import prepare_one
from titan_tools.infer.tasks.score import prepare_score
from titan_tools.infer.text.chat_template import read_template
from titan_tools.infer.text.vocabulary import read_vocabulary
from titan_tools.launch import inside_launch, rank_errors, run_ranks, started_by_titan

_INTERRUPTED = 130


def infer(request: Request) -> None:
    """Do what was asked and print it. Ranks that this process starts do and print it in its place."""
    with rank_errors():
        check_options(request)
        for checkpoint in find_checkpoints(request.checkpoint):
            with open_native(checkpoint, model_from=find_model_place(request.model_from)) as weights:
                work = _look(request, weights)
                task = _prepare(work)
                if task.rows == 0:
                    task.run(None, Ranks(1, 0, torch.device("cpu")))
                    return
                if checkpoint != request.checkpoint:
                    note(f"reading {checkpoint}")
                if _passes_over(weights, is_named=checkpoint == request.checkpoint):
                    continue
                model = _load(work, weights) if work.tp == 1 or inside_launch() else None
            break
        if model is not None:
            _run(task, work, model)
            return
    _start_ranks(request, checkpoint, work)


def _look(request: Request, weights: NativeWeights) -> Work:
    """Everything that headers, tokenizer and numbers can tell, before ranks start and weights are read."""
    args = weights.info.args
    tp = degree(request.tp)
    check_tp(args, tp)
    check_devices(tp)
    if request.compile:
        check_compiler(own_device())
    check_sampling(request.sampling, vocab_size=args.vocab_size)
    check_logprobs(request.logprobs, vocab_size=args.vocab_size)
    folder = find_tokenizer(weights.catalog.root, request.model_from)
    vocabulary = read_vocabulary(folder, weights.info)
    template = replace(read_template(folder), moment=request.moment) if request.chat else None
    stored = weights.source.tensors["tok_embeddings.weight"].dtype
    # Beside 8 bits kernels take bfloat16 alone, and more exact sums would not make up for what they lose
    own = "bfloat16" if request.quantize else stored if stored in ("float32", "bfloat16") else "float32"
    return Work(request, args, vocabulary, template, tp, request.dtype or own)


def _prepare(work: Work) -> Task:
    request = work.request
    if request.score:
        return prepare_score(work)
    if request.batch:
        return prepare_batch(work)
    if request.text is not None:
        return prepare_one(work)
    return prepare_chat(work)


def _passes_over(weights: NativeWeights, *, is_named: bool) -> bool:
    """Whether the checkpoint is a run's damaged step, of which there may be older ones; that is told, as in training.

    Raises CheckpointError where it is damaged and may not be passed over: the user named it.
    """
    if not _looks_for_all():
        return False
    try:
        check_read_files(weights.catalog, weights.source.ledger.used.values())
    except CheckpointError as damage:
        if is_named or inside_launch():  # ranks must agree on the step
            raise
        note(f"WARNING: passing over a damaged step: {damage.message}")
        return True
    return False


def _looks_for_all() -> bool:
    """Whether this process is the one that reads every file for damage: the first, and before it starts others."""
    return not inside_launch() or (os.environ["RANK"] == "0" and not started_by_titan())


def _run(task: Task, work: Work, model: SlicedModel) -> None:
    """Do the task together with the other ranks."""
    compile = work.request.compile
    with joined(work.tp, model.device) as ranks:
        task = _at_one_moment(task, work, ranks)
        if model.device.type == "cpu" and not compile:  # which would find no graph in it
            sum_in_shared_memory([model.body, model.head], rank=ranks.rank, tp=ranks.tp)
        task.run(Engine(model, rows=task.rows, room=task.room, compile=compile), ranks)


def _at_one_moment(task: Task, work: Work, ranks: Ranks) -> Task:
    """The task, made anew where its chat template tells the time: ranks that torchrun started have one each."""
    if work.template is None or not work.template.tells_time:
        return task
    moment = ranks.told_by_first(work.template.moment)
    if moment == work.template.moment:
        return task
    return _prepare(replace(work, template=replace(work.template, moment=moment)))


def _start_ranks(request: Request, checkpoint: Path, work: Work) -> None:
    """The same command once per rank, on the very step that was found here; what was asked travels in a file."""
    with tempfile.TemporaryDirectory(prefix="titan-infer-") as folder:
        asked = Path(folder) / "request.json"
        save_request(request, asked)
        argv = ["infer", f"--tp={work.tp}", f"--request={asked}", "--", str(checkpoint)]
        try:
            exit_code = run_ranks(argv, nproc=work.tp, saves=False)
        except BaseException as error:
            if request.out and request.out.exists():
                error.add_note(f"finished results are in {request.out}; the same command goes on from there")
            raise
    if exit_code:  # no rank had anything to tell: they were stopped from outside
        raise typer.Exit(_INTERRUPTED if exit_code < 0 else exit_code)


def _load(work: Work, weights: NativeWeights) -> SlicedModel:
    rank = int(os.environ["RANK"]) if work.tp > 1 else 0
    how, dtype, device = work.request.quantize, getattr(torch, work.dtype), own_device()
    if how and rank == 0 and (reason := why_slow(how, dtype=dtype, device=device)):
        note(reason)
    return load_model(
        weights.source,
        weights.info,
        dtype=dtype,
        device=device,
        tp=work.tp,
        rank=rank,
        quantize=how,
        packed=not work.request.compile,
    )
