"""Metric sinks: the `MetricSink` protocol; console, metrics.jsonl and TensorBoard; sinks that a user registers."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from converters.common.extensions import check_call, check_name, check_protocol
from converters.common.names import RESUMED_FROM
from trainer.config.custom_import import error_of_import
from trainer.observability.log import note
from trainer.observability.status_line import clock_text, erase
from trainer.observability.tags import torchtitan_tags


class MetricSink(Protocol):
    """Receives the metrics of a run, in the process of the rank that logs."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Unknown metrics are left out; a loss may be NaN or infinite."""
        ...

    def close(self) -> None:
        """Write what is buffered. Called once, at the end of the run, also after an error."""
        ...


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The run that a sink logs. `config` is the merged config by section, as `titan config show --json` prints it."""

    dump_folder: Path
    config: Mapping[str, Any]
    num_done: int  # steps that were done before, in a run that resumes
    num_logged: int = 0  # the last step with a record: if it is larger, the steps in between are logged again


_REGISTERED: dict[str, Callable[[LoggedRun], MetricSink]] = {}


def register_metric_sink(name: str, open_sink: Callable[[LoggedRun], MetricSink]) -> None:
    """Send the metrics of every run to `open_sink(run)` too; it is called on rank 0, before the first step."""
    check_name("metric sink", name, _REGISTERED)
    check_call(open_sink, ("run",), f"metric sink {name!r}")
    _REGISTERED[name] = open_sink


def open_registered_sinks(run: LoggedRun) -> list[MetricSink]:
    """The sinks that a module in experimental.custom_import has registered, opened."""
    return [RegisteredSink(name, open_sink, run) for name, open_sink in _REGISTERED.items()]


class RegisteredSink:
    """A sink of a user's module. One that raises is reported once and gets no more metrics; the run goes on.

    Raises ExtensionError before the first step if it is not a MetricSink.
    """

    def __init__(self, name: str, open_sink: Callable[[LoggedRun], MetricSink], run: LoggedRun):
        self._name, self._is_on = name, True
        self._sink: MetricSink | None = None
        self._attempt(lambda: setattr(self, "_sink", open_sink(run)))
        if self._is_on:
            check_protocol(self._sink, MetricSink, f"metric sink {name!r}", made_by=open_sink)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._is_on and self._sink is not None:
            log, own = self._sink.log, dict(metrics)  # another sink does not see what this one changes
            self._attempt(lambda: log(step, own))

    def close(self) -> None:
        if self._sink is not None:
            self._attempt(self._sink.close)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # of whatever kind: a run must not end for its metrics
            if self._is_on:
                of_import = error_of_import(error)
                what = of_import[0].message if of_import else f"{type(error).__name__}: {error}"
                note(f"WARNING: the metric sink {self._name!r} is switched off, training continues without it: {what}")
            self._is_on = False


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without NaN and infinity, which neither JSON nor a plot can show."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


class ConsoleSink:
    """One line per record on stdout. `prefix` begins each line; `num_steps` is the length of the run, for the ETA."""

    def __init__(self, *, prefix: str, color: bool, num_steps: int, unit: str, units_per_step: int):
        self._prefix, self._color = prefix, color and sys.stdout.isatty()
        self._num_steps, self._unit, self._units_per_step = num_steps, unit, units_per_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "validation_loss" in metrics:
            line = validation_line(step, metrics)
        else:
            secs_per_step = self._units_per_step / metrics[f"{self._unit}_per_sec"]
            line = step_line(step, metrics, unit=self._unit, eta_secs=secs_per_step * (self._num_steps - step))
        line = self._prefix + line
        if sys.stdout.isatty():
            erase()
        # one write: lines of several ranks share the console
        print(f"\033[36m{line}\033[0m\n" if self._color else f"{line}\n", end="", flush=True)

    def close(self) -> None:
        pass


class JsonlSink:
    """One JSON object per record, appended to a file line by line, so that a killed run leaves all its records."""

    def __init__(self, path: Path, *, num_done: int):
        """`num_done` marks in the file where a resumed run repeats steps: earlier records of them no longer count."""
        self.num_logged = _last_logged_step(path)
        self._file = _open_to_append(path)
        if self.num_logged > num_done:
            self._file.write(json.dumps({"step": num_done, RESUMED_FROM: num_done}) + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **finite(metrics)}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """TensorBoard scalars under torchtitan's tags, and `texts` by their tags, in Markdown.

    Of a resumed run it shows no earlier points of steps after `num_done`. TensorBoard's name for the run is that of the
    folder that holds the event files, below the one that it is started with.
    """

    def __init__(self, folder: Path, *, num_done: int, texts: Mapping[str, str] | None = None):
        from torch.utils.tensorboard import SummaryWriter  # here: the import is slow

        self._writer: Any = SummaryWriter(str(folder), purge_step=num_done + 1)
        for tag, text in (texts or {}).items():
            self._writer.add_text(tag, text, num_done)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tag, value in torchtitan_tags(finite(metrics)).items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _open_to_append(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    file = path.open("a", buffering=1)
    if is_torn:  # the last run was killed within a line
        file.write("\n")
    return file


def _last_logged_step(path: Path) -> int:
    """The highest step that a file has a valid record of; 0 if there is none."""
    last = 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError, KeyError):  # an incomplete line
            record = json.loads(line)
            last = int(record["step"]) if RESUMED_FROM in record else max(last, int(record["step"]))
    return last


def step_line(step: int, metrics: Mapping[str, float], *, unit: str, eta_secs: float) -> str:
    """The console line of a training step."""
    parts = [
        f"step {step:>6}",
        f"loss {metrics['loss']:.4f}",
        f"grad_norm {metrics['grad_norm']:.4f}",
        f"lr {metrics['lr']:.2e}",
        f"{unit}/s {metrics[f'{unit}_per_sec']:,.0f}",
    ]
    if (tflops := metrics.get("tflops_per_rank")) is not None:
        parts.append(f"TFLOP/s {tflops:.{2 if tflops >= 1 else 4}f}")
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    in_use = f" ({metrics['memory_allocated_gib']:.2f} in use)" if "memory_allocated_gib" in metrics else ""
    parts += [f"data {metrics['data_secs'] * 1000:.1f} ms", f"memory {metrics['memory_gib']:.2f} GiB{in_use}"]
    if "expert_load" in metrics:
        parts.append(f"expert load {metrics['expert_load']:.2f}, {metrics['dead_experts']:.0f} dead")
    if metrics["skipped_steps"]:
        parts.append(f"skipped {metrics['skipped_steps']}")
    parts.append(f"ETA {clock_text(eta_secs)}")
    return "  ".join(parts)


def validation_line(step: int, metrics: Mapping[str, float]) -> str:
    """The console line of a validation."""
    line = f"step {step:>6}  held-out loss {metrics['validation_loss']:.4f}"
    if "validation_perplexity" in metrics:
        line += f"  perplexity {metrics['validation_perplexity']:.2f}"
    if "validation_unigram_entropy" in metrics:
        line += f"  unigram entropy {metrics['validation_unigram_entropy']:.4f}"
    return line
