"""What `titan estimate-memory` does: check everything, estimate, print, draw, and give the exit code."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from converters.errors import ConfigError, UnsupportedError, list_offenders
from converters.replace_file import replacing
from titan_tools.console import count, note, print_json
from titan_tools.memory.allocator_settings import allocator_of_environment
from titan_tools.memory.constants import Gpu
from titan_tools.memory.gpus import find_gpu
from titan_tools.memory.layout import resolved_layout
from titan_tools.memory.replay.allocator import AllocatorName
from titan_tools.memory.torch_library import map_torch_library
from titan_tools.memory.trace.coverage import NotTraceable, trace_gaps
from trainer.config.load import load_config
from trainer.config.sections import Config
from trainer.parallel.float8 import capability_needed, is_float8

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
    timeline: Path | None = None,
    snapshot: Path | None = None,
) -> int:
    """Print the estimate of a config; 0, or with a GPU type its verdict as exit code.

    Raises ConfigError with everything wrong in flags and layout, UnsupportedError with everything not covered.
    """
    gpu, problems = _gpu(gpu_text)
    problems += _output_problems(timeline, snapshot)
    if allocator not in (None, *ALLOCATORS):
        problems.append(f"--allocator {allocator!r} is none; possible: {', '.join(ALLOCATORS)}")
    settings = load_config(config, overrides)
    problems += _gpu_problems(settings, gpu)
    dims = resolved_layout(settings, world_size=world_size, problems=problems)
    if world_size is None and settings.parallelism.data_parallel_shard_degree == -1:
        note(
            f"estimated for {count(dims.world_size, 'rank')}: parallelism.data_parallel_shard_degree = -1 takes all"
            " the ranks there are; --world-size N says how many"
        )
    flags = {"--world-size": world_size, "--gpu": gpu_text, "--allocator": allocator}
    flags |= {"--timeline": timeline, "--snapshot": snapshot, "--json": as_json}
    if gaps := trace_gaps(settings, dims):
        nearest = {gap.keys[0]: gap.nearest for gap in gaps}
        raise UnsupportedError(
            "no estimate is given for what is not covered:" + list_offenders([gap.reason for gap in gaps], most=50),
            hint="a guess would be worse than none",
            tries=[same_command(config, overrides, flags=flags, changed=nearest)],
        )

    map_torch_library()
    from titan_tools.memory import report
    from titan_tools.memory.estimate import estimate
    from titan_tools.memory.replay.snapshot import write_snapshot
    from titan_tools.memory.verdict import EXIT_CODES

    try:
        found = estimate(settings, dims, gpu=gpu, allocator=allocator or allocator_of_environment())
    except NotTraceable as error:
        error.tries = (same_command(config, overrides, flags=flags, changed=error.nearest),)
        raise
    if timeline:
        _write(timeline, lambda path: report.draw(found, path))
    if snapshot:
        _write(snapshot, lambda path: write_snapshot(found.fullest, path))
    if as_json:
        print_json(report.as_json(found))
    else:
        report.show(found)
    return EXIT_CODES[found.verdicts[0].verdict] if gpu else 0


def _gpu(text: str | None) -> tuple[Gpu | None, list[str]]:
    if text is None:
        return None, []
    try:
        return find_gpu(text), []
    except ConfigError as error:
        return None, [f"{error.message}; {error.hint}; nearest: {' or '.join(error.tries)}"]


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Write beside it and put it there whole: a full disk must not cost a file that is there. Raises ConfigError."""
    try:
        with replacing(path) as temporary:
            write(temporary)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def _gpu_problems(config: Config, gpu: Gpu | None) -> list[str]:
    """What a GPU type has no kernels for."""
    if gpu is None or not is_float8(config.model) or config.float8.emulate:
        return []
    major, minor = capability_needed(config.float8)
    if gpu.sm >= 10 * major + minor:
        return []
    return [f"float8 needs a GPU of compute capability {major}.{minor} or higher, and {gpu.name} has {gpu.sm / 10}"]


def _output_problems(timeline: Path | None, snapshot: Path | None) -> list[str]:
    """Files that cannot be written, told before the work."""
    problems = []
    if timeline and not timeline.is_dir() and timeline.suffix.lower() not in PICTURES:
        problems.append(f"--timeline {timeline}: a picture's name ends in {' or '.join(PICTURES)}")
    if timeline and snapshot and timeline.absolute() == snapshot.absolute():
        problems.append(f"--timeline and --snapshot name the same file, {timeline}")
    for path in filter(None, (timeline, snapshot)):
        if path.is_dir():
            problems.append(f"{path} is a folder, and a file is to be written there")
        elif path.exists() and not path.is_file():  # it would be replaced by a file, where one may do that
            problems.append(f"{path} is a device or a pipe, and a file is to be written there")
        elif not path.absolute().parent.is_dir():
            problems.append(f"{path.absolute().parent} is no folder, so {path.name} cannot be written there")
        elif not os.access(path.absolute().parent, os.W_OK):
            problems.append(f"{path.absolute().parent} is not yours to write to, so {path.name} cannot be put there")
    return problems


def same_command(
    config: str, overrides: Sequence[str], *, flags: Mapping[str, object], changed: Mapping[str, str]
) -> str:
    """A line for the shell. `flags`: the command's own, left out where None or False; `changed`: keys → values."""
    words = ["titan", "estimate-memory", config]
    for flag, value in flags.items():
        if value is True:
            words.append(flag)
        elif value not in (None, False):
            words += [flag, str(value)]
    words += _without(overrides, changed)
    return shlex.join([*words, *(f"--{key}={value}" for key, value in changed.items())])


def _without(overrides: Sequence[str], keys: Mapping[str, str]) -> list[str]:
    """The overrides that are about other keys."""
    kept: list[str] = []
    is_kept = True
    for word in overrides:
        if word.startswith("--"):
            section, dot, name = word[2:].partition("=")[0].replace("-", "_").rpartition(".")
            is_kept = section + dot + name not in keys and section + dot + name.removeprefix("no_") not in keys
        if is_kept:
            kept.append(word)
    return kept
