"""Whole training runs inside a pool of ranks, on a small index of made-up text."""

import json
import random
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from converters.errors import TitanError
from trainer.build import TrainModel, build
from trainer.checkpoint import Checkpoints, Progress, RunState
from trainer.checkpoint_write import write_step
from trainer.chosen_model import chosen_model
from trainer.config.sections import (
    ActivationCheckpoint,
    Checkpoint,
    Config,
    Job,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Training,
)
from trainer.data.batch import Batch
from trainer.data.prepare import prepare
from trainer.lr_schedule import LRSchedule
from trainer.mesh import make_meshes
from trainer.optim import GradientClip, build_optimizer
from trainer.parallel_dims import resolve
from trainer.ranks import Ranks
from trainer.signals import StopRequest
from trainer.train import lr_curve, train, train_loader

SEQ_LEN = 32


def make_data(folder: Path) -> Path:
    """A token index of sentences that can be learnt, in the fraction of a second."""
    words = random.Random(0).choices([f"word{n}" for n in range(40)], k=6000)
    lines = [" ".join(words[i : i + 12]) for i in range(0, len(words), 12)]
    (folder / "text.txt").write_text("\n".join(lines))
    prepare([folder / "text.txt"], folder / "data", vocab_size=290, held_out=0.1)
    return folder / "data"


def make_config(data: Path, dump: Path, *, flavor: str = "debug_gqa", steps: int = 4, **sections: dict) -> Config:
    """A run of a few steps that saves after every second; `sections` change keys of sections."""
    config = Config(
        job=Job(dump_folder=str(dump)),
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
    )
    return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in sections.items()})


def read_losses(dump: Path) -> dict[int, float]:
    """Step → loss as the run's metrics tell it; the last telling counts."""
    records = map(json.loads, (dump / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def _ranks() -> Ranks:
    return Ranks(torch.device("cpu"), dist.new_group(backend="gloo"))


def run(config: Config, request: StopRequest | None = None) -> str:
    """Case: a run; the error it ends with, if any."""
    try:
        train(config, _ranks(), request or StopRequest())
    except TitanError as error:
        return f"{type(error).__name__}: {error.message} | {error.hint}"
    return ""


def run_until_asked_to_stop(config: Config) -> str:
    """Case: the last rank alone is asked to stop, before the first step."""
    request = StopRequest()
    request.requested = dist.get_rank() == dist.get_world_size() - 1
    return run(config, request)


def run_into_a_nan(config: Config) -> str:
    """Case: on the last rank alone, the loss of step 3 is not a number."""
    whole, num_calls = TrainModel.forward_backward, 0
    calls_per_step = 2  # microbatches

    def poisoned(model: TrainModel, batch: Batch, num_valid_tokens: float) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        loss = whole(model, batch, num_valid_tokens)
        is_here = num_calls > 2 * calls_per_step and dist.get_rank() == dist.get_world_size() - 1
        return loss * float("nan") if is_here else loss

    TrainModel.forward_backward = poisoned
    try:
        return run(config)
    finally:
        TrainModel.forward_backward = whole


def _run_state(config: Config, ranks: Ranks) -> tuple[RunState, Checkpoints]:
    info = chosen_model(config.model)
    meshes = make_meshes(resolve(config.parallelism, dist.get_world_size()), "cpu")
    model = build(config, info.args, meshes.dims, meshes, ranks.device)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    loader = train_loader(config, meshes, vocab_size=info.args.vocab_size)
    state = RunState(model, optimizer, LRSchedule(optimizer, lr_curve(config)), loader, Progress())
    return state, Checkpoints(Path(config.job.dump_folder), config.checkpoint, info, group=ranks.agreement)


def copy_step(config: Config, source: Path, destination: Path) -> Progress:
    """Case: load a step in this layout and save it again."""
    ranks = _ranks()
    state, checkpoints = _run_state(config, ranks)
    checkpoints.load(source, state)
    nested = dict(state.model.state_dict()) | state.sections()
    write_step(destination, nested, info=chosen_model(config.model), group=ranks.agreement)
    return state.progress


def clip_twice(config: Config, max_norm: float) -> dict[str, float]:
    """Case: norms before and after clipping, ours and as torch computes them from whole gradients."""
    state, _ = _run_state(config, _ranks())
    model, dims = state.model, state.model.meshes.dims
    model.initialize(0)
    batch = next(iter(state.loader))
    model.forward_backward(batch, batch.num_valid_tokens)
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
