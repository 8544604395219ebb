"""`titan infer` from checkpoint to text: check everything, start ranks, load the model, run the task."""

import tempfile
from dataclasses import replace
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path

import torch
import typer

from converters.source.weights import NativeWeights, open_native
from converters.store.location import locate
from converters.tokenizers.tokenizer import tokenizer_note
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.find import FoundCheckpoint, find_checkpoints
from titan_tools.infer.generation_config import note_on, read_generation_config
from titan_tools.infer.identity import check_same_inputs
from titan_tools.infer.loading import is_damaged, load_weights, prepare_work
from titan_tools.infer.memory import memory_for_sequences, require_on_gpu, require_on_host, rows_that_fit
from titan_tools.infer.model.load import SlicedModel
from titan_tools.infer.ranks import TPRanks, tensor_parallel_group, tp_degree
from titan_tools.infer.request import Request, check_options, save_request
from titan_tools.infer.task import Task, Work
from titan_tools.infer.tasks.batch import prepare_batch
from titan_tools.infer.tasks.batch_lines import is_read_once
from titan_tools.infer.tasks.chat import prepare_chat
from titan_tools.infer.tasks.one_prompt import prepare_one
from titan_tools.infer.tasks.results_settings import recorded_moment
from titan_tools.infer.tasks.score import prepare_score
from titan_tools.launch.agent import run_ranks
from titan_tools.launch.launch import Launch, environment_of_ranks
from titan_tools.launch.rank import inside_launch, rank_errors
from titan_tools.terminal.console import note
from trainer.ranks.agree import on_each
from trainer.ranks.machine import machine_identity


def run_request(request: Request) -> None:
    """Run a request and print its results, in this process or in the ranks that it starts."""
    with rank_errors():
        check_options(request, is_settled=not request.generation_config)
        tp = tp_degree(request.tp)
        if tp > 1 and not inside_launch():
            if _needs_ranks(_with_recorded_moment(request)):
                _start_ranks(request, tp)
            return
        with tensor_parallel_group(tp) as ranks:
            _run_on_rank(ranks.done_by_first(lambda: _with_recorded_moment(request)), ranks)


def _run_on_rank(request: Request, ranks: TPRanks) -> None:
    """The same steps on every rank: an error of one rank is raised on all of them."""
    checkpoints = find_checkpoints(request.checkpoint)
    ready = None
    while ready is None:
        ready = _prepare(request, ranks.done_by_first(lambda: next(checkpoints)), ranks)
    task, work, model = ready
    if model is None:
        task.run(None, ranks)
        return
    rows = rows_that_fit(model, work.args, ranks, rows=task.rows, room=task.room)
    with memory_for_sequences(work, model, rows=rows, room=task.room):
        task.run(Engine(model, rows=rows, room=task.room, compile=work.request.compile), ranks)


def _prepare(request: Request, found: FoundCheckpoint, ranks: TPRanks) -> tuple[Task, Work, SlicedModel | None] | None:
    """The task and its model; None instead of the model if there is nothing to do, None if the step is damaged."""
    with ranks.done_by_each(open_native, found.place, select=request.select, model_from=request.model_from) as weights:
        work = ranks.done_by_each(prepare_work, request, weights)
        if ranks.is_first and (text := tokenizer_note(work.tokenizer_folder)):
            note(text)
        # A batch from a pipe can be read only once, so the step must be known to be whole before
        is_once = found.is_step and request.batch is not None and is_read_once(request.batch)
        if is_once and is_damaged(found, weights, ranks):
            return None
        task = ranks.done_by_each(_prepare_task, work)
        if ranks.done_by_first(partial(_is_done, task)):  # only the first rank reads the results file
            return task, work, None
        _check_same_inputs(work, ranks)
        ranks.done_by_each(_check_memory, work, weights, task, ranks)
        if not is_once and is_damaged(found, weights, ranks):
            return None
        config = read_generation_config(work.tokenizer_folder, weights.info)
        if ranks.is_first and (text := note_on(config, work.request)):
            note(text)
        return task, work, ranks.done_by_each(load_weights, work, weights, ranks, rows=task.rows)


def _needs_ranks(request: Request) -> bool:
    """Whether there is work for ranks. Problems with the request are raised here, before ranks start."""
    found = next(find_checkpoints(request.checkpoint))
    with open_native(found.place, select=request.select, model_from=request.model_from) as weights:
        work = prepare_work(request, weights)
        task = _prepare_task(work)
        if task.rows > 0 and not torch.cuda.is_available():
            require_on_host(work, weights, task, range(work.tp), place="this machine")
    if task.rows == 0:
        task.run(None, TPRanks(1, 0, torch.device("cpu")))
    return task.rows > 0


def _check_memory(work: Work, weights: NativeWeights, task: Task, ranks: TPRanks) -> None:
    """Raise ConfigError if this machine, or this rank's GPU, cannot hold weights and cache; before any is read."""
    if ranks.device.type == "cuda":
        require_on_gpu(work, weights, task, ranks)
    else:
        require_on_host(work, weights, task, ranks.on_this_machine, place="this machine")


def _is_done(task: Task) -> bool:
    return task.rows == 0


def _with_recorded_moment(request: Request) -> Request:
    """The request with the time of the first run, if --out holds results: the chat template may write it."""
    return replace(request, moment=recorded_moment(request.out) or request.moment)


def _check_same_inputs(work: Work, ranks: TPRanks) -> None:
    """Raise ConfigError on all ranks if one reads other files than the first, as on machines of their own."""
    if ranks.tp > 1:
        check_same_inputs(on_each(ranks.control_group, lambda: _inputs_of(work)))


def _inputs_of(work: Work) -> dict[str, tuple[str, str]]:
    """Name → (digest, path) of every input that a rank reads itself; the options are the first rank's."""
    request, vocabulary, origin = work.request, work.vocabulary, work.origin
    assert origin is not None  # as with several ranks
    model_from = request.model_from or origin.checkpoint
    token_ids = repr((vocabulary.prefix, vocabulary.suffix, sorted(vocabulary.stop_ids), vocabulary.stop_strings))
    inputs = {
        "checkpoint": (origin.weights, origin.checkpoint),
        "model": (repr(work.args), model_from),
        "tokenizer": (origin.tokenizer + token_ids, model_from),
    }
    if work.template is not None:
        inputs["chat template"] = work.template.identity, model_from
    if request.batch is not None:
        with request.batch.open("rb") as file:
            inputs["batch"] = file_digest(file, blake2b).hexdigest(), locate(request.batch)
    host = machine_identity()[0]
    return {
        name: (blake2b(identity.encode("utf-8", "surrogatepass")).hexdigest(), f"{place.absolute()} on {host}")
        for name, (identity, place) in inputs.items()
    }


def _prepare_task(work: Work) -> Task:
    request = work.request
    if request.score:
        return prepare_score(work)
    if request.batch:
        return prepare_batch(work)
    if request.text is not None:
        return prepare_one(work)
    return prepare_chat(work)


def _start_ranks(request: Request, tp: int) -> None:
    """Run the same command once per rank; the request is passed in a file."""
    with tempfile.TemporaryDirectory(prefix="titan-infer-") as folder:
        path = Path(folder) / "request.json"
        save_request(request, path)
        command = ("infer", f"--tp={tp}", f"--request={path}", "--", str(request.checkpoint))
        try:
            exit_code = run_ranks(Launch(command, nproc=tp, environment=environment_of_ranks(tp)), saves=False)
        except BaseException as error:
            if request.out and request.out.exists():
                error.add_note(f"finished results are in {request.out}; the same command resumes there")
            raise
    if exit_code:  # of a rank without an error message: its output has no reader any more, for example
        raise typer.Exit(exit_code)
