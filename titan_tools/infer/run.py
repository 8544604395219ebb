"""`titan infer` from checkpoint to text: look for everything that can be wrong, start ranks, load, do the task."""

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
from titan_tools.infer.find import Found, find_checkpoints, find_tokenizer
from titan_tools.infer.free_memory import rows_that_fit
from titan_tools.infer.generation_config import follow, note_on, read_generation_config
from titan_tools.infer.model.freed_memory import keep_freed_memory
from titan_tools.infer.model.load import SlicedModel, load_model
from titan_tools.infer.model.quantize import why_slow
from titan_tools.infer.model.shared_memory import sum_in_shared_memory
from titan_tools.infer.model.slices import check_tp
from titan_tools.infer.options import check_options
from titan_tools.infer.origin import origin_of
from titan_tools.infer.out_of_memory import memory_for_sequences, memory_for_weights
from titan_tools.infer.ranks.devices import check_devices, degree
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.ranks.join import joined
from titan_tools.infer.request import Request, save_request
from titan_tools.infer.same_inputs import require_same_inputs
from titan_tools.infer.task import Task, Work
from titan_tools.infer.tasks.batch import prepare_batch
from titan_tools.infer.tasks.batch_lines import is_read_once
from titan_tools.infer.tasks.chat import prepare_chat
from titan_tools.infer.tasks.made_with import recorded_moment
from titan_tools.infer.tasks.one_prompt import prepare_one
from titan_tools.infer.tasks.score import prepare_score
from titan_tools.infer.text.chat_template import read_template
from titan_tools.infer.text.vocabulary import read_vocabulary
from titan_tools.launch import inside_launch, rank_errors, run_ranks
from trainer.data.tokenizer import tokenizer_note

_COMPUTED_IN = ("float32", "bfloat16", "float16")  # unless another dtype is asked for


def infer(request: Request) -> None:
    """Do what was asked and print it. Ranks that this process starts do and print it in its place."""
    with rank_errors():
        check_options(request, is_settled=not request.generation_config)
        tp = degree(request.tp)
        if tp > 1 and not inside_launch():
            if _is_worth_ranks(_at_its_moment(request)):
                _start_ranks(request, tp)
            return
        with joined(tp) as ranks:
            _infer(ranks.done_by_first(lambda: _at_its_moment(request)), ranks)


def _infer(request: Request, ranks: Ranks) -> None:
    """On every rank the same, step by step: what is wrong on one ends all of them, with the same words."""
    steps = find_checkpoints(request.checkpoint)
    while True:
        found = ranks.done_by_first(lambda: next(steps))
        with ranks.done_by_each(_open, request, found) as weights:
            work = ranks.done_by_each(_look, request, weights)
            tokenizer = find_tokenizer(weights.catalog.root, request.model_from, weights.info.assets)
            if ranks.is_first and (text := tokenizer_note(tokenizer)):
                note(text)
            # A batch that comes through a pipe must not be used up by a damaged step
            comes_once = found.is_step and request.batch is not None and is_read_once(request.batch)
            if comes_once and _is_damaged(found, weights, ranks):
                continue
            task = ranks.done_by_each(_prepare, work)
            if _is_done(task, ranks):
                task.run(None, ranks)
                return
            require_same_inputs(work, ranks)
            if not comes_once and _is_damaged(found, weights, ranks):
                continue
            if ranks.is_first and (line := _on_generation_config(work, weights)):
                note(line)
            model = ranks.done_by_each(_load, work, weights, ranks, rows=task.rows)
        _run(task, work, model, ranks)
        return


def _is_worth_ranks(request: Request) -> bool:
    """Whether ranks have anything to do. What is wrong with it is told before they start."""
    found = next(find_checkpoints(request.checkpoint))
    with _open(request, found) as weights:
        task = _prepare(_look(request, weights))
    if task.rows == 0:
        task.run(None, Ranks(1, 0, torch.device("cpu")))
    return task.rows > 0


def _is_done(task: Task, ranks: Ranks) -> bool:
    """Whether an earlier run has left nothing to do, as the first rank knows: it alone looks at the results."""
    return ranks.done_by_first(lambda: task.rows == 0)


def _at_its_moment(request: Request) -> Request:
    """What was asked for, as of the time at which the results in --out were begun, if there are any."""
    return replace(request, moment=recorded_moment(request.out) or request.moment)


def _open(request: Request, found: Found) -> NativeWeights:
    return open_native(found.folder, model_from=request.model_from)


def _look(request: Request, weights: NativeWeights) -> Work:
    """Everything that headers, tokenizer and numbers can tell, before ranks start and weights are read."""
    args = weights.info.args
    tp = degree(request.tp)
    check_tp(args, tp)
    check_devices(tp)
    if request.compile:
        check_compiler(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    folder = find_tokenizer(weights.catalog.root, request.model_from, weights.info.assets)
    if request.generation_config:
        config = read_generation_config(folder, weights.info)
        request = follow(config, request, folder=folder, vocab_size=args.vocab_size)
        check_options(request)
    check_sampling(request.sampling, vocab_size=args.vocab_size)
    check_logprobs(request.logprobs, vocab_size=args.vocab_size)
    vocabulary = read_vocabulary(folder, weights.info)
    template = replace(read_template(folder), moment=request.moment) if request.chat else None
    stored = weights.source.tensors["tok_embeddings.weight"].dtype
    # Beside 8 bits kernels take bfloat16 alone, and more exact sums would not make up for what they lose
    own = "bfloat16" if request.quantize else stored if stored in _COMPUTED_IN else "float32"
    origin = origin_of(weights, tokenizer=folder) if request.out or tp > 1 else None
    return Work(request, args, vocabulary, template, tp, request.dtype or own, origin)


def _on_generation_config(work: Work, weights: NativeWeights) -> str:
    folder = find_tokenizer(weights.catalog.root, work.request.model_from, weights.info.assets)
    return note_on(read_generation_config(folder, weights.info), work.request)


def _prepare(work: Work) -> Task:
    request = work.request
    if request.score:
        return prepare_score(work)
    if request.batch:
        return prepare_batch(work)
    if request.text is not None:
        return prepare_one(work)
    return prepare_chat(work)


def _is_damaged(found: Found, weights: NativeWeights, ranks: Ranks) -> bool:
    """Whether this step of a run is damaged, so that an older one takes its place; a note says so, as in training.

    Each rank reads a share of the files. Raises CheckpointError for damage in a checkpoint that the user named itself.
    """
    if ranks.is_first:
        for skipped in found.skipped:
            note(f"skipped {skipped}")
        if found.is_step:
            note(f"reading {found.folder}")
        for text in weights.catalog.notes:
            note(f"{found.folder}: {text}")
        for text in weights.info.notes:
            note(text)
    names = weights.source.ledger.used.values()
    try:
        ranks.done_by_each(check_read_files, weights.catalog, names, do_all=ranks.shared_out)
    except CheckpointError as damage:
        if not found.is_step:
            raise
        if ranks.is_first:
            note(f"WARNING: passing over a damaged step: {damage.message}")
        return True
    return False


def _load(work: Work, weights: NativeWeights, ranks: Ranks, *, rows: int) -> SlicedModel:
    how, dtype, device = work.request.quantize, getattr(torch, work.dtype), ranks.device
    reason = how and why_slow(how, dtype=dtype, device=device, rows=rows)
    if reason and ranks.is_first:
        note(reason)
    with memory_for_weights(work, weights.info):
        return load_model(
            weights.source,
            weights.info,
            dtype=dtype,
            device=device,
            tp=ranks.tp,
            rank=ranks.rank,
            quantize=how,
            packed=not work.request.compile,
        )


def _run(task: Task, work: Work, model: SlicedModel, ranks: Ranks) -> None:
    """Do the task together with the other ranks."""
    compile = work.request.compile
    rows = rows_that_fit(model, work.args, ranks, rows=task.rows, room=task.room)
    if model.device.type == "cpu":
        keep_freed_memory()
        if not compile:  # which would find no graph in it
            sum_in_shared_memory([model.body, model.head], rank=ranks.rank, tp=ranks.tp)
    with memory_for_sequences(work, model, rows=rows, room=task.room):
        task.run(Engine(model, rows=rows, room=task.room, compile=compile), ranks)


def _start_ranks(request: Request, tp: int) -> None:
    """The same command once per rank; what was asked travels in a file."""
    with tempfile.TemporaryDirectory(prefix="titan-infer-") as folder:
        asked = Path(folder) / "request.json"
        save_request(request, asked)
        argv = ["infer", f"--tp={tp}", f"--request={asked}", "--", str(request.checkpoint)]
        try:
            exit_code = run_ranks(argv, nproc=tp, saves=False)
        except BaseException as error:
            if request.out and request.out.exists():
                error.add_note(f"finished results are in {request.out}; the same command goes on from there")
            raise
    if exit_code:  # of a rank that had nothing to tell: nobody reads its output any more, say
        raise typer.Exit(exit_code)
