"""The kinds of data, and unsupported data settings, which are reported with the layout's problems."""

from math import ceil

from converters.mesh_shape import MeshShape
from trainer.config.sections import Training, Validation

TOKENS = "tokens"
TEXT_KINDS = ("c4_test", "jsonl", "text", "parquet")
C4, C4_VALIDATION = "c4", "c4_validation"
_STREAMED = (C4, C4_VALIDATION)
known_kinds = [TOKENS, *TEXT_KINDS, C4, C4_VALIDATION]  # built in, then registered


def data_problems(training: Training, validation: Validation, dims: MeshShape) -> list[str]:
    """Every unsupported combination of data keys, and of data keys with the layout, each with values that work."""
    problems = _source_problems("training", training)
    if training.dataset == C4 and training.dataset_streams % dims.batch:
        problems.append(
            f"training.dataset_streams = {training.dataset_streams} cannot be divided over a data-parallel degree of"
            f" {dims.batch}; degrees that divide it: {', '.join(map(str, _divisors(training.dataset_streams)))};"
            f" a new run may take training.dataset_streams = {ceil(training.dataset_streams / dims.batch) * dims.batch}"
        )
    if validation.enable:
        problems += _source_problems("validation", validation)
        if validation.dataset == C4 and validation.steps == -1:
            problems.append("validation.dataset = 'c4' would take weeks: set validation.steps, or use c4_validation")
        seen = {path for path in (training.dataset_path, *dict(training.dataset_mix)) if path}
        also = sorted(seen & {validation.dataset_path, *dict(validation.dataset_mix)})
        if also and training.dataset in TEXT_KINDS and validation.dataset in TEXT_KINDS:
            problems.append(
                f"validation reads {', '.join(also)}, which is trained on; `titan data prepare` holds out a part of it"
            )
    return problems


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


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
