"""`titan estimate-memory`: check flags and config, estimate, write files, print, and return the exit code."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from converters.common.errors import ConfigError, UnsupportedError, list_offenders
from converters.store.replace_file import replacing
from titan_tools.memory.allocator_settings import allocator_of_environment
from titan_tools.memory.imbalance import JUDGED_IMBALANCE, imbalance_problems
from titan_tools.memory.replay.allocator import AllocatorName
from titan_tools.memory.trace.coverage import NotTraceable, trace_gaps
from titan_tools.terminal.console import count, current_work, note, print_json
from trainer.config.load import load_config
from trainer.config.sections import Config
from trainer.job.job import resolve_job
from trainer.job.record import Job
from trainer.parallel.float8 import capability_needed, is_float8
from trainer.ranks.gpus import DEFAULT_GPU, GPUS, Gpu, gpus_called

ALLOCATORS: tuple[AllocatorName, ...] = ("classic", "expandable")
PICTURES = (".png", ".svg", ".pdf")


def estimate_from_command_line(
    config: str,
    overrides: Sequence[str],
    *,
    world_size: int | None,
    gpu_text: str | None,
    as_json: bool,
    allocator: str | None = None,
    imbalance: float | None = None,
    timeline: Path | None = None,
    snapshot: Path | None = None,
) -> int:
    """Print the estimate of a config. Returns 0, or with a GPU type its verdict as exit code.

    Raises ConfigError with every problem of flags and layout, UnsupportedError with everything that is not covered.
    """
    gpu, problems = _gpu(gpu_text)
    problems += _output_problems(timeline, snapshot)
    chosen = next((name for name in ALLOCATORS if name == allocator), None)
    if allocator is not None and chosen is None:
        problems.append(f"--allocator {allocator!r} is not one of {', '.join(ALLOCATORS)}")
    settings = load_config(config, overrides)
    problems += gpu_problems(settings, gpu)
    job = _resolve(settings, world_size, problems, imbalance=imbalance)
    if world_size is None and settings.parallelism.data_parallel_shard_degree == -1:
        note(
            f"estimated for {count(job.dims.world_size, 'rank')}: parallelism.data_parallel_shard_degree = -1 uses all"
            " ranks, and --world-size N sets how many there are"
        )
    flags: dict[str, object] = {"--world-size": world_size, "--gpu": gpu_text, "--allocator": allocator}
    flags["--imbalance"] = imbalance
    flags |= {"--timeline": timeline, "--snapshot": snapshot, "--json": as_json}
    if gaps := trace_gaps(settings, job.dims):
        nearest = {gap.keys[0]: gap.nearest for gap in gaps}
        raise UnsupportedError(
            "estimate-memory does not cover this config:" + list_offenders([gap.reason for gap in gaps], most=50),
            hint="no estimate is given, since it would be a guess",
            tries=[same_command(config, overrides, flags=flags, changed=nearest)],
        )

    with current_work() as say:
        say(f"{settings.model.name} {settings.model.flavor} on {count(job.dims.world_size, 'rank')}: importing torch")
        from titan_tools.memory import report
        from titan_tools.memory.estimate import estimate
        from titan_tools.memory.replay.snapshot import write_snapshot
        from titan_tools.memory.verdict import EXIT_CODES

        try:
            result = estimate(
                job,
                gpu=gpu,
                allocator=chosen or allocator_of_environment(),
                imbalance=JUDGED_IMBALANCE if imbalance is None else imbalance,
                say=say,
            )
        except NotTraceable as error:
            error.tries = (same_command(config, overrides, flags=flags, changed=error.nearest),)
            raise
    if timeline:
        _write(timeline, lambda path: report.draw(result, path))
    if snapshot:
        _write(snapshot, lambda path: write_snapshot(result.fullest, path))
    if as_json:
        print_json(report.as_json(result))
    else:
        report.show(result)
    return EXIT_CODES[result.verdicts[0].verdict] if gpu else 0


def find_gpu(text: str) -> Gpu:
    """The GPU type of that name, or one of that many usable GiB (kernels as on the default one). Raises ConfigError."""
    alike = gpus_called(text)
    if len(alike) == 1:
        return alike[0]
    if alike:
        names = [gpu.name for gpu in alike]
        raise ConfigError(
            f"--gpu {text!r} is the name of several types",
            hint=f"types: {', '.join(names)}",
            tries=[f"--gpu {name}" for name in names],
        )
    name = text.strip().lower()
    try:
        usable = float(name.removesuffix("gib"))
    except ValueError:
        usable = 0.0
    if not 0 < usable < 10_000:
        closest = get_close_matches(name, GPUS, 1, cutoff=0.6)
        raise ConfigError(
            f"--gpu {text!r} is neither a GPU type nor a number of GiB",
            hint=f"types: {', '.join(GPUS)}; for another one give its total_memory in GiB, as torch.cuda reports it",
            tries=[*(f"--gpu {name}" for name in closest), "--gpu 47.5"],
        )
    return Gpu(f"{usable:g} GiB", usable, DEFAULT_GPU.sm, DEFAULT_GPU.cublas_mib)


def _gpu(text: str | None) -> tuple[Gpu | None, list[str]]:
    if text is None:
        return None, []
    try:
        return find_gpu(text), []
    except ConfigError as error:
        return None, [f"{error.message}; {error.hint}; nearest: {' or '.join(error.tries)}"]


def _resolve(config: Config, world_size: int | None, problems: list[str], *, imbalance: float | None) -> Job:
    """The job. Raises ConfigError with `problems`, those of the layout and of the imbalance."""
    try:
        job = resolve_job(config, world_size)
    except ConfigError as error:
        if not problems:
            raise
        found = [*problems, error.message + (f" ({error.hint})" if error.hint else "")]
        raise ConfigError("invalid arguments:" + list_offenders(found, most=50), tries=error.tries) from None
    problems = problems + imbalance_problems(job, imbalance)
    if problems:
        raise ConfigError("invalid arguments:" + list_offenders(problems, most=50))
    return job


def gpu_problems(config: Config, gpu: Gpu | None) -> list[str]:
    """Settings of the config that the GPU type has no kernels for."""
    if gpu is None or not is_float8(config.model) or config.float8.emulate:
        return []
    major, minor = capability_needed(config.float8)
    if gpu.sm >= 10 * major + minor:
        return []
    return [f"float8 needs a GPU of compute capability {major}.{minor} or higher, and {gpu.name} has {gpu.sm / 10}"]


def _output_problems(timeline: Path | None, snapshot: Path | None) -> list[str]:
    """Why files could not be written, found before the estimate is made."""
    problems = []
    if timeline and not timeline.is_dir() and timeline.suffix.lower() not in PICTURES:
        problems.append(f"--timeline {timeline}: the file name must end in {' or '.join(PICTURES)}")
    if timeline and snapshot and timeline.absolute() == snapshot.absolute():
        problems.append(f"--timeline and --snapshot name the same file, {timeline}")
    for path in filter(None, (timeline, snapshot)):
        folder = path.absolute().parent
        if path.is_dir():
            problems.append(f"{path} is a folder; give the name of a file")
        elif path.exists() and not path.is_file():  # it would be replaced by a file
            problems.append(f"{path} is a device or a pipe; give the name of a file")
        elif not folder.is_dir():
            problems.append(f"{folder} is not a folder; create it, or write {path.name} elsewhere")
        elif not os.access(folder, os.W_OK):
            problems.append(f"{folder} is not writable; write {path.name} elsewhere")
    return problems


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Replace the file at once, so that a full disk does not cost an existing file. Raises ConfigError."""
    try:
        with replacing(path) as temporary:
            write(temporary)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def same_command(
    config: str, overrides: Sequence[str], *, flags: Mapping[str, object], changed: Mapping[str, str]
) -> str:
    """The command as it was typed, with some keys of the config changed, for a refusal's `try:`.

    `flags`: the command's own, left out where None or False; `changed`: keys → values.
    """
    words = ["titan", "estimate-memory", config]
    for flag, value in flags.items():
        if value is True:
            words.append(flag)
        elif value not in (None, False):
            words += [flag, str(value)]
    words += _without(overrides, changed)
    return shlex.join([*words, *(f"--{key}={value}" for key, value in changed.items())])


def _without(overrides: Sequence[str], keys: Mapping[str, str]) -> list[str]:
    """The overrides of other keys."""
    kept: list[str] = []
    is_kept = True
    for word in overrides:
        if word.startswith("--"):
            section, dot, name = word[2:].partition("=")[0].replace("-", "_").rpartition(".")
            is_kept = section + dot + name not in keys and section + dot + name.removeprefix("no_") not in keys
        if is_kept:
            kept.append(word)
    return kept
