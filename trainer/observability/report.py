"""Measure a training run and log its metrics every few steps, on the ranks that log."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from converters.common.errors import Preempted
from converters.common.names import METRICS_FILE
from trainer.checkpoints.run_state import Progress
from trainer.config.sections import Metrics
from trainer.config.show import as_json
from trainer.job.record import Job
from trainer.models.objectives import get_objective
from trainer.observability.log import note, shown_ranks
from trainer.observability.sinks import (
    ConsoleSink,
    JsonlSink,
    LoggedRun,
    MetricSink,
    TensorBoardSink,
    open_registered_sinks,
)
from trainer.observability.status_line import StepProgress, erase, is_possible
from trainer.observability.throughput import StepClock, peak_memory
from trainer.observability.wandb_sink import WandbSink
from trainer.optim.expert_balance import ExpertLoad
from trainer.ranks.gpus import data_sheet
from trainer.step import OwnShare, StepResult


class Report:
    """Measures from the moment it is made, and sends metrics to this rank's sinks; most ranks have none.

    Loss and gradient norm are equal on all ranks, in a pipeline too, so rank 0 writes the records, with the most memory
    that a rank has taken. With metrics.save_for_all_ranks every rank writes its own measurements to TensorBoard.
    LOG_RANK says which ranks print.
    """

    def __init__(self, job: Job, progress: Progress, *, device: torch.device, rank: int, batch_rank: int = 0):
        """`progress` is the state that the run starts from; a resumed run continues its run at Weights & Biases.

        `batch_rank`: ranks with the same one have parts of the same samples.
        """
        self._wandb: WandbSink | None = None
        self._of_one_rank: list[MetricSink] = []  # sinks whose memory is this rank's, not the most of all ranks
        self._objective = get_objective(job.family.name)
        self._units_per_step = self._objective.units_per_step(job)
        self._sinks = self._open_sinks(job, progress, rank)
        is_alone = shown_ranks(dist.get_world_size()) == {rank}  # several ranks would replace each other's line
        self._progress = StepProgress(job.config.training.steps) if is_alone and is_possible() else None
        config = job.config
        self._device, self._num_ranks, self._batch_rank = device, dist.get_world_size(), batch_rank
        self._every, self._num_steps = config.metrics.log_freq, config.training.steps
        self._clock = StepClock(
            flops_per_unit=self._objective.flops_per_unit(job),
            num_ranks=self._num_ranks,
            peak=data_sheet(torch.cuda.get_device_name(device)).bf16_flops if device.type == "cuda" else None,
        )

    def _open_sinks(self, job: Job, progress: Progress, rank: int) -> list[MetricSink]:
        dump, settings = Path(job.config.job.dump_folder), job.config.metrics
        shown = shown_ranks(dist.get_world_size())
        sinks: list[MetricSink] = []
        if rank in shown:
            console = ConsoleSink(
                prefix="" if shown == {0} else f"[rank {rank}] ",
                color=not settings.disable_color_printing and "NO_COLOR" not in os.environ,
                num_steps=job.config.training.steps,
                unit=self._objective.unit,
                units_per_step=self._units_per_step,
            )
            sinks.append(console)
            if shown != {0}:
                self._of_one_rank.append(console)
        if tensorboard := _tensorboard_folder(settings, dump, rank):
            sinks.append(TensorBoardSink(tensorboard, num_done=progress.step, texts=_texts(job)))
            if settings.save_for_all_ranks:
                self._of_one_rank.append(sinks[-1])
        if rank == 0:
            records = JsonlSink(dump / METRICS_FILE, num_done=progress.step)
            run = LoggedRun(dump, as_json(job.config)["config"], progress.step, records.num_logged)
            sinks += [records, *open_registered_sinks(run)]
            if settings.enable_wandb:  # last: an error of a user's sink leaves no run open there
                self._wandb = WandbSink(run, run_id=progress.wandb_run_id)
                sinks.append(self._wandb)
        return sinks

    @property
    def wandb_run_id(self) -> str | None:
        """The run at Weights & Biases that this rank logs to."""
        return self._wandb.run_id if self._wandb else None

    def step(self, progress: Progress, result: StepResult, *, lr: float) -> None:
        """Count a step; log it if it is the first, the last, or one of every `metrics.log_freq`."""
        self._clock.count_step(self._units_per_step)
        if self._progress and progress.step < self._num_steps:
            self._progress.update(progress.step)
        if progress.step % self._every and progress.step not in (1, self._num_steps):
            return
        speed, memory = self._clock.read(), peak_memory(self._device)
        of_all = self._of_all_ranks(result, memory)
        if not self._sinks:
            return
        unit = self._objective.unit
        metrics = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            f"{unit}_per_sec": speed.units_per_sec,
            f"{unit}_per_sec_per_rank": speed.units_per_sec / self._num_ranks,
            **({} if speed.tflops_per_rank is None else {"tflops_per_rank": speed.tflops_per_rank}),
            **({} if speed.mfu is None else {"mfu": speed.mfu}),
            "step_secs": speed.secs_per_step,
            "data_secs": speed.data_secs,
            **of_all,
            f"n{unit}_seen": progress.units_seen,
            "skipped_steps": progress.skipped_steps,
            **load_metrics(result.expert_loads),
        }
        for sink in self._sinks:
            sink.log(progress.step, metrics | memory if sink in self._of_one_rank else metrics)

    def _of_all_ranks(self, result: StepResult, memory: Mapping[str, float]) -> dict[str, float]:
        """The largest mean loss of a data-parallel rank's own units, and the most memory of a rank."""
        share = result.own or OwnShare(result.loss, result.num_units)
        row = [self._batch_rank, share.loss, share.num_units, *memory.values()]
        local = torch.tensor(row, dtype=torch.float64, device=self._device)
        gathered = [torch.empty_like(local) for _ in range(self._num_ranks)]
        dist.all_gather(gathered, local)
        columns = torch.stack(gathered).T.tolist()
        shares, units = Counter[float](), dict(zip(columns[0], columns[2], strict=True))
        for batch_rank, loss in zip(columns[0], columns[1], strict=True):
            shares[batch_rank] += loss
        means = [shares[rank] * result.num_units / num for rank, num in units.items() if num]
        most = [max(column) for column in columns[3:]]
        return {"max_loss": max(means, default=result.loss), **dict(zip(memory, most, strict=True))}

    def validation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log the metrics of a validation."""
        measured = {name: value for name, value in metrics.items() if value is not None}
        for sink in self._sinks:
            sink.log(step, measured)

    def fetching(self) -> AbstractContextManager[None]:
        """Context around loading a step's samples."""
        return self._clock.fetching()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context around what is not training time: validation, a checkpoint."""
        self._clock.pause()
        yield
        self._clock.resume()

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Close the sinks, also after an error: then a rank ends without Python's exit handlers, such as wandb's."""
        erase()
        if self._wandb and error is not None:
            self._wandb.end_early(failed=not isinstance(error, Preempted))
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as problem:
                if error is None:
                    raise
                note(f"WARNING: metrics may be incomplete: {problem}")  # must not hide the run's own error


def load_metrics(loads: Sequence[ExpertLoad]) -> dict[str, float]:
    """The worst load and the number of experts without work, of each layer with experts and of all."""
    if not loads:
        return {}
    return {
        "expert_load": max(load.max_over_mean for load in loads),
        "dead_experts": sum(load.num_dead for load in loads),
        **{f"expert_load/layer_{load.layer}": load.max_over_mean for load in loads},
        **{f"dead_experts/layer_{load.layer}": load.num_dead for load in loads},
    }


def _tensorboard_folder(settings: Metrics, dump: Path, rank: int) -> Path | None:
    """The folder of this rank's scalars, if it writes any; two ranks never write to one file."""
    if not settings.enable_tensorboard or not (rank == 0 or settings.save_for_all_ranks):
        return None
    folder = dump / settings.save_tb_folder / _name_of(dump)
    return folder / f"rank_{rank}" if settings.save_for_all_ranks else folder


def _name_of(dump: Path) -> str:
    """A run's name: that of its folder."""
    return dump.resolve().name or "run"


def _texts(job: Job) -> dict[str, str]:
    """Text that TensorBoard shows beside the scalars."""
    config = job.config
    name = _name_of(Path(config.job.dump_folder))
    ranks = f"{job.dims.world_size} rank{'s' if job.dims.world_size > 1 else ''}"
    return {
        "run/name": f"**{name}**: {config.described()}, on {ranks}",
        "run/config": f"```json\n{json.dumps(as_json(config)['config'], indent=2)}\n```",
    }
