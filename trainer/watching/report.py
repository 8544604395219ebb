"""What a run says of itself: a line and a record every few steps, and the held-out loss; rank 0 does, or every rank."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.checkpoints.run_state import Progress
from trainer.config.sections import Metrics
from trainer.gpus import data_sheet
from trainer.job import Job
from trainer.step import StepResult
from trainer.watching.log_rank import shown_ranks
from trainer.watching.metrics import (
    METRICS_FILE,
    MetricsLog,
    StepClock,
    flops_per_token,
    peak_memory,
    step_line,
)


class Report:
    """Measures from the moment it is made.

    Loss and norm are the same on every rank, in a pipeline too, so rank 0 speaks for all; the others are silent, or
    with metrics.save_for_all_ranks write to TensorBoard what they have measured. LOG_RANK chooses others.
    """

    def __init__(
        self,
        job: Job,
        *,
        device: torch.device,
        rank: int,
        num_done: int | None = None,
    ):
        """`num_done` is the step that the run resumes from."""
        config = job.config
        dump, settings = Path(config.job.dump_folder), config.metrics
        tensorboard = _tensorboard_folder(settings, dump, rank)
        shown = shown_ranks(dist.get_world_size())
        self._is_silent = rank != 0 and tensorboard is None and rank not in shown
        if self._is_silent:
            return
        self._log = MetricsLog(
            dump / METRICS_FILE if rank == 0 else None,
            console=None if rank not in shown else "" if shown == {0} else f"[rank {rank}] ",
            tensorboard_folder=tensorboard,
            color=not settings.disable_color_printing and "NO_COLOR" not in os.environ,
            num_done=num_done,
        )
        self._device, self._num_ranks = device, dist.get_world_size()
        self._every, self._num_steps = settings.log_freq, config.training.steps
        self._tokens_per_step = job.tokens_per_step
        self._clock = StepClock(
            flops_per_token=flops_per_token(
                job.args, num_parameters=job.num_parameters, seq_len=config.training.seq_len
            ),
            num_ranks=self._num_ranks,
            peak=data_sheet(torch.cuda.get_device_name(device)).bf16_flops if device.type == "cuda" else None,
        )

    def step(self, progress: Progress, result: StepResult, *, lr: float) -> None:
        """Count a step; tell of it if it is the first, the last, or one of `metrics.log_freq`."""
        if self._is_silent:
            return
        self._clock.count_step(self._tokens_per_step)
        if progress.step % self._every and progress.step not in (1, self._num_steps):
            return
        speed = self._clock.read()
        scalars = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens_per_sec": speed.tokens_per_sec,
            "tokens_per_sec_per_rank": speed.tokens_per_sec / self._num_ranks,
            "tflops_per_rank": speed.tflops_per_rank,
            "mfu": speed.mfu,
            "data_secs": speed.data_secs,
            **peak_memory(self._device),
            "ntokens_seen": progress.ntokens_seen,
            "skipped_steps": progress.skipped_steps,
        }
        eta_secs = speed.secs_per_step * (self._num_steps - progress.step)
        self._log.say(step_line(progress.step, scalars, eta_secs=eta_secs))
        self._log.write(progress.step, scalars)

    def validation(self, step: int, scalars: dict[str, float | None]) -> None:
        """Tell of the held-out loss, whenever there is one."""
        if self._is_silent:
            return
        loss, perplexity = scalars["validation_loss"], scalars["validation_perplexity"]
        line = f"step {step:>6}  held-out loss {loss:.4f}  perplexity {perplexity:.2f}"
        if (entropy := scalars["validation_unigram_entropy"]) is not None:
            line += f"  unigram entropy {entropy:.4f}"
        self._log.say(line)
        self._log.write(step, scalars)

    def fetching(self) -> AbstractContextManager[None]:
        """Around the fetch of a step's samples."""
        return nullcontext() if self._is_silent else self._clock.fetching()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training time: validation, a checkpoint."""
        if self._is_silent:
            yield
            return
        self._clock.pause()
        yield
        self._clock.resume()

    def close(self) -> None:
        if not self._is_silent:
            self._log.close()


def _tensorboard_folder(settings: Metrics, dump: Path, rank: int) -> Path | None:
    """Where this rank writes scalars, if it does: one file's steps must not be told by two ranks."""
    if not settings.enable_tensorboard or not (rank == 0 or settings.save_for_all_ranks):
        return None
    folder = dump / settings.save_tb_folder
    return folder / f"rank_{rank}" if settings.save_for_all_ranks else folder
