"""Convert a checkpoint: open, plan, copy, commit. Either the whole output appears or nothing does."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converters.catalog import Catalog, count_dtypes
from converters.errors import CheckpointError
from converters.execute import Execution, Progress, check_places, execute, no_progress, require_room
from converters.open import open_checkpoint
from converters.outputs.base import OutputOptions
from converters.outputs.registry import get_output
from converters.plan import plan_conversion, sections_left_out
from converters.source_check import unchecked_remark, vouched_for
from converters.weights import native_weights

_COMMANDS = (("hf", "dcp"), ("dcp", "hf"), ("meta", "dcp"), ("dcp", "meta"))  # `titan convert A-to-B`
_CONTAINERS_OF = {"dcp": ("dcp",), "hf": ("safetensors", "torch"), "meta": ("meta",)}
_CALLED = {"dcp": "a DCP checkpoint", "hf": "a Hugging Face checkpoint", "meta": "an original Meta release"}
_CALLED_CONTAINER = {
    "dcp": "a DCP checkpoint",
    "safetensors": "a Hugging Face checkpoint (safetensors)",
    "torch": "a torch file",
    "meta": "an original Meta release",
}


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was done, or would be done by a run that is not dry."""

    source: str
    destination: str
    source_format: str  # container and naming
    to: str
    model: str
    num_tensors: int
    num_files: int
    num_bytes: int
    dtypes: Mapping[str, int]  # bytes by element type in the output
    num_cast: int
    dropped: Mapping[str, str]  # source tensor → reason
    left_out: Mapping[str, int]  # section → entries
    non_finite: Mapping[str, int]  # tensor → values that are NaN or infinite
    remarks: tuple[str, ...]
    other_files: tuple[str, ...]  # tokenizer, configs
    secs: float
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    src: Path | str,
    dst: Path | str,
    *,
    to: str,
    source: str | None = None,
    dtype: str | None = None,
    options: OutputOptions = OutputOptions(),  # noqa: B008  frozen
    model_from: Path | str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> ConvertReport:
    """Write the weights of `src` as `to` into the folder `dst`.

    `source`: what `src` is expected to be (dcp, hf, meta); another kind is an error that names the right command.
    `options`: what the format lets one choose. `dtype` casts every floating tensor. A `dry_run` stops when everything
    is planned and checked.
    """
    output = get_output(to)
    src, dst, started = Path(src), Path(dst), time.monotonic()
    check_places(src, dst, overwrite=overwrite)
    catalog = open_checkpoint(src)
    _require_source(src, dst, catalog, source, to)
    with native_weights(catalog, model_from=model_from) as weights:
        plan = plan_conversion(weights, dst=dst, output=output, options=options, dtype=dtype)
        vouched = vouched_for(catalog, plan.stored)
        require_room(dst, plan.target)
        done = Execution({}, [])
        if not dry_run:
            done = execute(
                dst,
                source=plan.contents.view,
                target=plan.target,
                casts=plan.casts,
                write_small_files=lambda folder: output.write_small_files(folder, plan.contents, options),
                native_rows=plan.native_rows,
                vouched=vouched,
                overwrite=overwrite,
                progress=progress,
            )
    return ConvertReport(
        source=str(src),
        destination=str(dst),
        source_format=f"{catalog.container}, {weights.naming} names",
        to=to,
        model=f"{weights.info.family}, {weights.info.args.num_layers} layers, dim {weights.info.args.dim}",
        num_tensors=len(plan.target.tensors),
        num_files=len(plan.target.file_bytes),
        num_bytes=plan.target.total_bytes,
        dtypes=count_dtypes(plan.target.tensors),
        num_cast=len(plan.casts),
        dropped=weights.source.ledger.dropped,
        left_out=sections_left_out(catalog),
        non_finite=done.non_finite,
        remarks=tuple(filter(None, [unchecked_remark(catalog, vouched)])),
        other_files=tuple(done.other_files),
        secs=time.monotonic() - started,
        dry_run=dry_run,
    )


def _require_source(src: Path, dst: Path, catalog: Catalog, source: str | None, to: str) -> None:
    """Raise CheckpointError where `src` is not what the command's name says."""
    if source is None or catalog.container in _CONTAINERS_OF[source]:
        return
    # "" for a torch file, which may hold anybody's names
    found = next((kind for kind, containers in _CONTAINERS_OF.items() if catalog.container == containers[0]), "")
    if found == to:
        tries = [f"titan reshard {src} {dst}"] if to == "dcp" else []
    elif (found, to) in _COMMANDS:
        tries = [f"titan convert {found}-to-{to} {src} {dst}"]
    else:
        tries = [f"titan convert auto {src} {dst} --to {to}"]
    raise CheckpointError(f"{src} is {_CALLED_CONTAINER[catalog.container]}, not {_CALLED[source]}", tries=tries)
