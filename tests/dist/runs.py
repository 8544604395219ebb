"""Whole training runs inside a pool of ranks, on a small index of made-up text."""

import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

import trainer.train
from converters.common.errors import TitanError
from converters.diff import diff
from converters.engine.read import CatalogReader
from converters.families.llama3 import FLAVORS
from converters.store.location import Place, locate
from converters.store.output import SummedFile
from tests import pretend_store
from tests.dist import slow_saver
from trainer.build import build
from trainer.checkpoints import background as checkpoint_async
from trainer.checkpoints import io as checkpoint_io
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.run_state import Progress, RunState
from trainer.checkpoints.write import write_step
from trainer.config.custom_import import import_custom
from trainer.config.sections import (
    ActivationCheckpoint,
    Checkpoint,
    Config,
    JobSection,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Training,
    Validation,
)
from trainer.data.batch import IGNORED, TokenBatch
from trainer.data.index import HELD_OUT, open_index
from trainer.data.loader import TokenLoader
from trainer.data.prepare import prepare
from trainer.data.training_data import text_preparation, train_loader
from trainer.job.chosen_model import chosen_model
from trainer.job.job import resolve_job
from trainer.models.registry import get_trainer_family
from trainer.next_token.data import open_held_out
from trainer.optim.clip import GradientClip
from trainer.optim.lr_schedule import LRSchedule, lr_curve
from trainer.optim.optimizer import build_optimizer
from trainer.ranks.mesh import make_meshes
from trainer.ranks.process_group import Ranks
from trainer.ranks.signals import StopRequest
from trainer.step import TrainStep
from trainer.train import train
from trainer.train_model import TrainModel
from trainer.validate import Validator

SEQ_LEN = 32
FSDP2 = {"parallelism": {"data_parallel_shard_degree": 2}, "training": {"local_batch_size": 1}}
T = TypeVar("T")


def make_data(folder: Path) -> Path:
    """A token index of sentences that can be learnt, in the fraction of a second."""
    words = random.Random(0).choices([f"word{n}" for n in range(40)], k=6000)
    lines = [" ".join(words[i : i + 12]) for i in range(0, len(words), 12)]
    (folder / "text.txt").write_text("\n".join(lines))
    prepare([folder / "text.txt"], folder / "data", vocab_size=290, held_out=0.1)
    return folder / "data"


TWO_LAYERS = replace(FLAVORS["debug_gqa"], num_layers=2)


@contextmanager
def two_layers() -> Iterator[None]:
    """Llama's flavor `two_layers`: the model of runs for which layers are nothing but time."""
    FLAVORS["two_layers"] = TWO_LAYERS
    yield
    del FLAVORS["two_layers"]


def make_config(data: Path, dump: Path, *, flavor: str = "two_layers", steps: int = 4, **sections: dict) -> Config:
    """A run of a few steps that saves after every second; `sections` change keys of sections."""
    config = Config(
        job=JobSection(dump_folder=str(dump)),
        metrics=Metrics(log_freq=1),
        model=Model(flavor=flavor, hf_assets_path=str(data)),
        optimizer=Optimizer(lr=1e-2),
        lr_scheduler=LRScheduler(warmup_steps=2),
        training=Training(
            dataset="tokens",
            dataset_path=str(data),
            local_batch_size=2,
            global_batch_size=4,
            seq_len=SEQ_LEN,
            steps=steps,
            mixed_precision_param="float32",
        ),
        checkpoint=Checkpoint(enable=True, interval=2, keep_latest_k=0),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        validation=Validation(
            dataset="tokens", dataset_path=str(data), local_batch_size=4, seq_len=SEQ_LEN, freq=2, steps=2
        ),
    )
    return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in sections.items()})


def read_losses(dump: Path) -> dict[int, float]:
    """Step → loss as the run's metrics tell it; the last telling counts."""
    records = map(json.loads, (dump / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def begin_from(dump: Path, source: Path, *steps: int) -> None:
    """Give a run the checkpoints of another, as if it had made them and stopped."""
    for step in steps:
        shutil.copytree(source / "checkpoint" / f"step-{step}", dump / "checkpoint" / f"step-{step}")


def differences(a: Path, b: Path, *, without_rng: bool = False) -> list[str]:
    """Everything in which two steps differ: tensors by their bits, plain values, sections that only one has."""
    report = diff(a, b)
    found = [f"{difference.name}: {difference.detail}" for difference in report.differences]
    found += [f"{section}: {where}" for section, where in report.not_compared.items()]
    return [output for output in found if not (without_rng and output.startswith("rng"))]


@cache
def _ranks() -> Ranks:
    return Ranks(torch.device("cpu"), dist.new_group(backend="gloo"))


def run(config: Config, request: StopRequest | None = None) -> str:
    """Case: a run; the error it ends with, if any."""
    try:
        train(resolve_job(config, dist.get_world_size()), _ranks(), request or StopRequest())
    except TitanError as error:
        return f"{type(error).__name__}: {error.message} | {error.hint}"
    return ""


def run_and_hear(config: Config) -> tuple[str, str]:
    """Case: a run; the error it ends with, if any, and its talk."""
    with redirect_stderr(io.StringIO()) as talk:
        return run(config), talk.getvalue()


def run_without_bf16_products(config: Config) -> tuple[str, str]:
    """Case: a run on a CPU without bf16 products, or that is said to be one; its error and its output."""
    whole, trainer.train.multiplies = trainer.train.multiplies, lambda dtype, device: dtype == torch.float32
    try:
        return run_and_hear(config)
    finally:
        trainer.train.multiplies = whole


def run_by_the_manifest_alone(config: Config) -> str:
    """Case: a run that must not read items for the CRC32s that they carry themselves."""

    def read_once_more(reader: CatalogReader, fqn: str) -> list[str]:
        raise TitanError(f"{fqn} is read though a manifest speaks for it")

    whole, CatalogReader.record_problems = CatalogReader.record_problems, read_once_more
    try:
        return run(config)
    finally:
        CatalogReader.record_problems = whole


def run_on_a_full_disk(config: Config, free_bytes: int = 1024) -> str:
    """Case: a run where the disk has next to nothing left."""
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=free_bytes)
    try:
        return run(config)
    finally:
        shutil.disk_usage = usage


def run_until_asked_to_stop(config: Config) -> str:
    """Case: the last rank alone is asked to stop, before the first step."""
    request = StopRequest()
    request.requested = dist.get_rank() == dist.get_world_size() - 1
    return run(config, request)


def run_into_a_nan(config: Config) -> str:
    """Case: on the last rank alone, the loss of step 3 is not a number."""
    whole, num_calls = TrainModel.forward_backward, 0
    calls_per_step = 2  # microbatches

    def poisoned(model: TrainModel, batch: TokenBatch, num_units: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        loss = whole(model, batch, num_units)
        is_here = num_calls > 2 * calls_per_step and dist.get_rank() == dist.get_world_size() - 1
        return loss * float("nan") if is_here else loss

    TrainModel.forward_backward = poisoned
    try:
        return run(config)
    finally:
        TrainModel.forward_backward = whole


def _run_state(config: Config, ranks: Ranks) -> tuple[RunState, Checkpoints]:
    job = resolve_job(config, dist.get_world_size())
    info = chosen_model(job)
    meshes = make_meshes(job.dims, "cpu")
    model = build(job, meshes, ranks.device)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    text = text_preparation(config.model, config.training, Path(config.job.dump_folder), ranks.agreement)
    loader = train_loader(job, meshes, text, group=ranks.agreement)
    schedule = LRSchedule(optimizer, lr_curve(config.lr_scheduler, config.training.steps))
    state = RunState(model, optimizer, schedule, loader, Progress())
    return state, Checkpoints(locate(config.job.dump_folder), config.checkpoint, info, group=ranks.agreement)


def copy_step(config: Config, source: Path, destination: Path) -> Progress:
    """Case: load a step in this layout and save it again."""
    ranks = _ranks()
    state, checkpoints = _run_state(config, ranks)
    checkpoints.load(locate(source), state)
    nested = dict(state.model.state_dict()) | state.sections()
    info = chosen_model(resolve_job(config, dist.get_world_size()))
    write_step(destination, nested, info=info, group=ranks.agreement)
    return state.progress


def save_and_draw(config: Config) -> list[float]:
    """Case: save step 1; the random numbers that this rank draws next."""
    state, checkpoints = _run_state(config, _ranks())
    state.model.initialize(0)
    torch.manual_seed(100 + dist.get_rank())
    torch.rand(7)
    checkpoints.save(1, state)
    return torch.rand(3).tolist()


def load_and_draw(config: Config) -> tuple[list[float], str]:
    """Case: load step 1; the random numbers that this rank draws next, and what was said."""
    state, checkpoints = _run_state(config, _ranks())
    torch.manual_seed(0)
    with redirect_stderr(io.StringIO()) as talk:
        checkpoints.resume(state)
    return torch.rand(3).tolist(), talk.getvalue()


def clip_twice(config: Config, max_norm: float) -> dict[str, float]:
    """Case: norms before and after clipping, ours and as torch computes them from whole gradients."""
    state, _ = _run_state(config, _ranks())
    model, dims = state.model, state.model.meshes.dims
    model.initialize(0)
    batch = next(iter(state.loader))
    model.forward_backward(batch, batch.num_units)
    model.sum_tied_gradients()

    def whole_norm() -> float:
        copies = set(map(id, model.tied_copies()))
        owned = [p.grad for p in model.named_parameters().values() if id(p) not in copies]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in owned]
        # in fp64, because torch's fp32 norm of a large CPU tensor is off by 4e-5 here
        total = torch.nn.utils.get_total_norm([g.double() for g in whole]).square()
        dist.all_reduce(total, group=model.meshes["pp"].get_group())
        return total.sqrt().item()

    expected = whole_norm()
    clip = GradientClip(
        model.named_parameters().values(),
        max_norm=max_norm,
        ranks_per_stage=dims.world_size // dims.pp,
        copies=model.tied_copies(),
    )
    return {"torch": expected, "ours": clip().item(), "after": whole_norm()}


def gradients_by_microbatch(config: Config) -> dict[int, tuple[float, float, list[torch.Tensor]]]:
    """Case: loss, norm and gradients of one step, by samples per microbatch; some targets are nothing to learn."""
    state, _ = _run_state(config, _ranks())
    state.model.initialize(0)
    batch = next(iter(state.loader))
    targets = batch.targets.clone()
    targets[0, 3:] = IGNORED  # a mean of means would show
    found = {}
    for size in (1, 2, 4):
        step = TrainStep(state.model, state.model.meshes, max_norm=1e9, local_batch_size=size)
        result = step.compute_gradients(TokenBatch(batch.tokens, targets)).read()
        found[size] = result.loss, result.grad_norm, [p.grad.clone() for p in state.model.named_parameters().values()]
        assert result.num_units == int((targets != IGNORED).sum()) and not result.stop_requested
        state.optimizer.zero_grad()
    return found


def validate(config: Config) -> list[dict[str, float]]:
    """Case: the held-out loss twice, with a step of training data in between."""
    ranks = _ranks()
    state, _ = _run_state(config, ranks)
    state.model.initialize(0)
    text = text_preparation(config.model, config.training, Path(config.job.dump_folder), ranks.agreement)
    job = resolve_job(config, dist.get_world_size())
    validation = Validator(state.model, open_held_out(job, state.model.meshes, text))
    batches = iter(state.loader)
    first, _, second = validation.run(), next(batches), validation.run()
    assert all(module.training for part in state.model.parts for module in part.modules())
    assert state.loader.state_dict()["consumed_samples"] == config.training.global_batch_size
    return [first, second]


def held_out_loss(config: Config, num_samples: int) -> float:
    """Case, one rank: the mean loss of the first held-out samples, one by one, by torch's own cross-entropy."""
    state, _ = _run_state(config, _ranks())
    state.model.initialize(0)
    model = get_trainer_family(config.model.name).build_model(state.model.args)
    model.load_state_dict(state.model.state_dict())
    index = open_index(config.training.dataset_path)
    keys = {"seq_len": SEQ_LEN, "global_batch_size": 1, "dp_rank": 0, "dp_degree": 1}
    losses = []
    for batch in islice(TokenLoader(index, HELD_OUT, seed=None, **keys), num_samples):
        with torch.no_grad():
            logits = model(batch.tokens, torch.arange(SEQ_LEN))
        losses.append(torch.nn.functional.cross_entropy(logits[0], batch.targets[0]).item())
    return sum(losses) / num_samples


def too_many_validation_steps(config: Config) -> str:
    """Case: the error of asking for more held-out batches than there are."""
    try:
        validate(config)
    except TitanError as error:
        return error.message
    return ""


def first_losses(config: Config, paths: dict[str, Place]) -> dict[str, float]:
    """Case: the loss of the first batch with the weights of each checkpoint, all of them loaded by one model."""
    state, checkpoints = _run_state(config, _ranks())
    batch = next(iter(state.loader))
    step = TrainStep(state.model, state.model.meshes, max_norm=1.0, local_batch_size=config.training.local_batch_size)
    losses = {}
    for name, path in paths.items():
        for parameter in state.model.named_parameters().values():
            parameter.detach().fill_(float("nan"))
        checkpoints.load_initial(locate(path), state)
        losses[name] = step.compute_gradients(batch).read().loss
        state.optimizer.zero_grad()
    return losses


def in_store(root: Path, case: Callable[..., T], config: Config, *arguments: object) -> T:
    """Case: another one with the pretend store of the folder `root`, whose lists show nothing new."""
    os.environ |= {pretend_store.ROOT: str(root), pretend_store.LAG: str(pretend_store.FOREVER)}
    import_custom("tests.pretend_store")
    return case(config, *arguments)


def _on_such_a_disk(how: str, case: Callable[[Config], T], config: Config) -> T:
    """A case of a run that saves in the background, where the disk is as tests/dist/slow_saver.py has it."""
    kept = checkpoint_io.CheckpointWriter.write_data, SummedFile.write, checkpoint_async.PROGRAM
    if how and config.checkpoint.async_mode == "async":
        getattr(slow_saver.Slow, how)()
    elif how:
        checkpoint_async.PROGRAM = [slow_saver.__file__, how]
    try:
        return case(config)
    finally:
        checkpoint_io.CheckpointWriter.write_data, SummedFile.write, checkpoint_async.PROGRAM = kept


def run_beside(config: Config, how: str = "") -> tuple[str, str]:
    """Case: a run that saves in the background; its error and its talk."""
    return _on_such_a_disk(how, run_and_hear, config)


def run_beside_with_numbers_from_outside(config: Config, how: str, folder: Path) -> tuple[str, str]:
    """Case: the same where the model's numbers are of a class that a file in `folder` defines, as custom ones are."""
    module, name = trainer.train, "chosen_model"
    kept, path = getattr(module, name), list(sys.path)
    (folder / "numbers_from_outside.py").write_text(
        "from converters.families.args import DecoderArgs\nclass OutsideArgs(DecoderArgs):\n    pass\n"
    )
    sys.path.append(str(folder))

    def chosen(*args):
        info = kept(*args)
        numbers = {field.name: getattr(info.args, field.name) for field in fields(info.args)}
        return replace(info, args=import_module("numbers_from_outside").OutsideArgs(**numbers))

    setattr(module, name, chosen)
    try:
        return run_beside(config, how)
    finally:
        setattr(module, name, kept)
        sys.path[:] = path


def run_into_a_nan_beside(config: Config) -> str:
    """Case: the same with a loss that is not a number, when the disk was full before."""
    return _on_such_a_disk("full_after_a_while", run_into_a_nan, config)
