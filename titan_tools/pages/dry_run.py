"""Print the page of `titan train --dry-run`: layout, parameters, bytes and collectives of one rank."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from converters.common.errors import ConfigError
from converters.common.fold import fold_texts
from converters.common.sizes import format_bytes
from converters.layout.mesh_shape import AXES
from titan_tools.terminal.console import count, current_work, note, print_json, table
from trainer.config.sections import Config
from trainer.config.show import unread
from trainer.job.job import resolve_job
from trainer.job.record import Job
from trainer.next_token.numbers import documents_of
from trainer.parallel.experts import has_experts

if TYPE_CHECKING:
    from trainer.dry_run import DryRun


def dry_run_from_command_line(config: Config, *, world_size: int | None, rank: int, as_json: bool) -> None:
    """Check, build and trace one rank, and print what was found. Raises ConfigError with every problem."""
    job = resolve_job(config, world_size)
    if rank >= job.dims.world_size:
        raise ConfigError(f"--rank {rank}: the job has ranks 0 to {job.dims.world_size - 1}")
    for line in unread(config):
        note(f"not read: {line}")
    with current_work() as say:
        say(f"{config.model.name} {config.model.flavor} on {count(job.dims.world_size, 'rank')}: importing torch")
        from trainer.dry_run import dry_run  # the errors above do not need torch

        say(f"building rank {rank} and running a step")
        report = dry_run(job, rank=rank)
    if as_json:
        print_json(as_record(config, report))
    else:
        _print(job, report)


def as_record(config: Config, report: "DryRun") -> dict[str, Any]:
    """The same as one JSON object."""
    named = {"units_per_step": f"{report.unit}_per_step"}
    left_out = ("dims", "coordinates", "collectives", "unit")
    plain = {named.get(key, key): getattr(report, key) for key in report.__slots__ if key not in left_out}
    return {
        "model": f"{config.model.name} {config.model.flavor}",
        "world_size": report.dims.world_size,
        "mesh": asdict(report.dims),
        "coordinates": asdict(report.coordinates),
        **plain,
        "collectives": [
            {"axis": axis, "kind": kind, **asdict(traffic)} for (axis, kind), traffic in report.collectives.items()
        ],
    }


def _print(job: Job, report: "DryRun") -> None:
    dims, at, uses_experts = report.dims, report.coordinates, has_experts(job.family, job.args)
    active = f" ({job.num_active_parameters:,} active)" if uses_experts else ""
    model = f"{job.config.model.name} {job.config.model.flavor}, {report.model_parameters:,} parameters{active}"
    print(f"{model}, on {count(dims.world_size, 'rank')}")
    position = ", ".join(
        f"{axis} {getattr(at, axis)} of {getattr(dims, axis)}" for axis in AXES if getattr(dims, axis) > 1
    )
    print(f"mesh          {dims}")
    if dims.ep > 1:
        print(f"experts       {dims.of_experts}; ep rank {at.ep}, etp rank {at.etp}")
    print(f"rank {report.rank:<8} {position or 'the only one'}")
    for stage, modules in report.stages.items():
        print(f"stage         {stage} of {report.num_stages}: {', '.join(fold_texts(modules))}")
    samples = f"{count(report.samples_per_step, 'sample')}, {report.units_per_step:,} {report.unit}"
    accumulated = f"; {report.num_accumulated} forward and backward passes" if report.num_accumulated > 1 else ""
    microbatches = f"; {report.num_microbatches} microbatches each" if report.num_microbatches > 1 else ""
    print(f"step          {samples}{accumulated}{microbatches}")
    print(f"steps         {report.steps:,}, {report.steps * report.units_per_step:,} {report.unit}")
    if (documents := documents_of(job)).mask != "none":
        print(f"documents     attention within each; mask: {documents.mask}, packing: {documents.packing}")
    print()
    total = report.parameter_bytes + report.gradient_bytes + report.optimizer_bytes
    table(
        ("on this rank", "size"),
        [
            (f"parameters ({report.rank_parameters:,})", format_bytes(report.parameter_bytes)),
            ("gradients", format_bytes(report.gradient_bytes)),
            ("optimizer states", format_bytes(report.optimizer_bytes)),
            ("together", format_bytes(total)),
        ],
    )
    if report.communicators:
        shared = [" = ".join(dict.fromkeys((name, *axes))) for name, axes in report.communicators.items()]
        print(f"\n{count(len(shared), 'communicator')}: {', '.join(shared)}")
    print("\nCollectives of one step, as this rank issues them")
    table(
        ("axis", "kind", "calls", "size"),
        [
            (axis, kind, traffic.calls, format_bytes(traffic.bytes))
            for (axis, kind), traffic in report.collectives.items()
        ],
    )
    note("sizes of collectives: the larger side, which is gathered output or scattered input")
    if dims.ep > 1:
        note("sizes of all-to-all: what this rank sends, to itself too, where tokens are spread evenly over experts")
    for line in report.left_out:
        note(f"left out: {line}")
    note("activations are not counted: titan estimate-memory estimates the peak")
