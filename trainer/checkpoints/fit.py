"""Compare a checkpoint with the model that it is loaded into, before any weight is changed."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from converters.common.box import TensorInfo
from converters.common.dtypes import DTYPES
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import OPTIMIZER, RNG, section_of
from converters.store.location import Location
from trainer.checkpoints.arrays import dtype_name
from trainer.ranks.agree import on_each


def refuse_misfits(
    wanted: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    values: Collection[str],
    *,
    group: dist.ProcessGroup,
    path: Location,
    may_cast: bool,
) -> None:
    """Raise CheckpointError, on every rank, with all keys that are missing, unexpected, or of another shape or dtype.

    Stock DCP casts fp32 to bf16 silently, and ignores keys that are not requested.
    """

    saved_sections = {section_of(key) for key in (*tensors, *values)}

    def look() -> tuple[set[str], set[str]]:
        problems = set()
        for fqn, value in wanted.items():
            if section_of(fqn) not in saved_sections:
                problems.add(f"{section_of(fqn)}: the checkpoint has no such section")
            elif problem := _misfit(value, tensors.get(fqn), fqn in values, may_cast=may_cast):
                problems.add(f"{fqn}: {problem}")
        return set(wanted), problems

    by_rank = on_each(group, look)
    wanted_keys = set().union(*(keys for keys, _ in by_rank))
    sections = {section_of(key) for key in wanted_keys}
    unexpected = {k for k in tensors if k not in wanted_keys and section_of(k) in sections and section_of(k) != RNG}
    problems = sorted(
        set().union(*(p for _, p in by_rank)) | {f"{k}: the model has no such tensor" for k in unexpected},
        key=lambda problem: (
            section_of(problem.partition(":")[0]) != "model",
            problem,
        ),  # weights first: moments repeat their problems
    )
    if problems:
        is_of_moments = any(p.startswith(f"{OPTIMIZER}.") and ": dtype " in p for p in problems)
        raise CheckpointError(
            f"{path} does not fit the config's model ({_counted(problems)}):" + list_offenders(problems),
            hint="nothing was loaded; sections can be left out with checkpoint.exclude_from_loading"
            + ("; moments are not cast: set optimizer.state_dtype" if is_of_moments else ""),
        )


def _counted(problems: list[str]) -> str:
    """The number of problems of each kind, since a long list is truncated."""
    kinds = {
        "missing": "missing",
        "the model has no such tensor": "unexpected",
        "shape ": "of another shape",
        "dtype ": "of another dtype",
        "the checkpoint has no such section": "sections missing",
    }
    details = [problem.partition(": ")[2] for problem in problems]
    counts = {name: sum(detail.startswith(kind) for detail in details) for kind, name in kinds.items()}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _misfit(value: Any, saved: TensorInfo | None, is_value: bool, *, may_cast: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return "" if is_value else "missing"
    if saved is None:
        return "missing"
    if tuple(value.shape) != tuple(saved.shape):
        return f"shape {list(saved.shape)} in the checkpoint, {list(value.shape)} in the model"
    dtype = dtype_name(value.dtype)
    if saved.dtype != dtype and not (may_cast and DTYPES[saved.dtype].is_floating and DTYPES[dtype].is_floating):
        return f"dtype {saved.dtype} in the checkpoint, {dtype} in the model"
    return ""
