"""The kinds of data, and unsupported data settings, which are reported with the layout's problems."""

from dataclasses import replace
from math import ceil

from converters.layout.mesh_shape import MeshShape
from trainer.config.sections import Dataloader, Training, Validation
from trainer.ranks.machine import Device

TOKENS = "tokens"
TEXT_KINDS = ("c4_test", "jsonl", "text", "parquet")
C4, C4_VALIDATION = "c4", "c4_validation"
_STREAMED = (C4, C4_VALIDATION)
_FEWEST_STREAMS = 64  # of a new run: it can go on at each degree that divides their number
known_kinds = [TOKENS, *TEXT_KINDS, C4, C4_VALIDATION]  # built in, then registered


def data_problems(training: Training, validation: Validation, dims: MeshShape) -> list[str]:
    """Every unsupported combination of data keys, and of data keys with the layout, each with values that work."""
    problems = _source_problems("training", training)
    num_streams = streams_of(training, dims.batch)
    if num_streams % dims.batch:
        problems.append(
            f"training.dataset_streams = {num_streams} cannot be divided over a data-parallel degree of {dims.batch};"
            f" degrees that divide it: {divisors(num_streams)}; unset, a new run takes"
            f" {streams_of(replace(training, dataset_streams=None), dims.batch)} streams"
        )
    datasets = {training.dataset, *([validation.dataset] if validation.enable else [])}
    if training.special_tokens and not datasets & {*TEXT_KINDS, *_STREAMED}:
        problems.append(
            f"training.special_tokens has no effect on dataset = {', '.join(sorted(datasets))}, which is no text;"
            " `titan data prepare --special-tokens` makes an index with special tokens"
        )
    if validation.enable:
        problems += _source_problems("validation", validation)
        if validation.dataset == C4 and validation.steps == -1:
            problems.append("validation.dataset = 'c4' would take weeks: set validation.steps, or use c4_validation")
        trained = {path for path in (training.dataset_path, *dict(training.dataset_mix)) if path}
        also = sorted(trained & {validation.dataset_path, *dict(validation.dataset_mix)})
        if also and training.dataset in TEXT_KINDS and validation.dataset in TEXT_KINDS:
            problems.append(
                f"validation reads {', '.join(also)}, which is trained on; `titan data prepare` holds out a part of it"
            )
    return problems


def pinning_machine_problems(training: Dataloader, validation: Dataloader, device: Device) -> list[str]:
    """Pinned memory is for copies to a GPU."""
    if device.type == "cuda":
        return []
    asked = {"training": training.pin_memory, "validation": validation.pin_memory}
    return [f"{name}.dataloader.pin_memory needs a GPU to copy batches to" for name, is_on in asked.items() if is_on]


def streams_of(training: Training, dp_degree: int) -> int:
    """Number of streams that the training data is read in; 0 for data that is not streamed."""
    if training.dataset != C4:
        return 0
    return training.dataset_streams or ceil(_FEWEST_STREAMS / dp_degree) * dp_degree


def _source_problems(section: str, settings: Training | Validation) -> list[str]:
    problems = []
    if settings.dataset not in known_kinds:
        problems.append(f"{section}.dataset = {settings.dataset!r} is unknown; there is {', '.join(known_kinds)}")
    if settings.dataset_mix and settings.dataset_path:
        both = f"{section}.dataset_path and {section}.dataset_mix"
        problems.append(f"{both} are both set: use one of them; a path may be `none`")
    if settings.dataset_mix and settings.dataset in _STREAMED:
        problems.append(
            f"{section}.dataset_mix needs random access, and {settings.dataset} is streamed;"
            " make indexes of its files with `titan data prepare`, or mix them as `jsonl`"
        )
    paths = [path for path, _ in settings.dataset_mix]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    return problems + [f"{section}.dataset_mix names {path} twice" for path in twice]


def divisors(number: int) -> str:
    """All numbers that divide `number`, as text."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
