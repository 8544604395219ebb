"""What every `titan convert` command does: its options become one call, the report becomes lines or JSON."""

from collections.abc import Mapping
from pathlib import Path


def run(
    *,
    src: Path,
    dst: Path,
    to: str,
    source: str | None,
    for_mesh: str | None = None,
    shard_size: str | None = None,
    num_shards: int | None = None,
    style: str | None = None,
    device: str | None = None,
    dataset: Path | None = None,
    no_digest: bool,
    as_json: bool,
    **as_they_are,
) -> None:
    """Convert and print. `source`: what SRC must be, None where it may be anything."""
    from converters.convert import convert
    from converters.formats.base import OutputOptions
    from converters.layout import MeshShape
    from titan_tools.console import print_json, progress

    report = convert(
        src,
        dst,
        to=str(to),
        source=source,
        options=OutputOptions(
            mesh=None if for_mesh is None else MeshShape.parse(for_mesh),
            shard_bytes=None if shard_size is None else parse_size(shard_size),
            num_shards=num_shards,
            style=None if style is None else str(style),
            device=device,
            dataset=dataset,
        ),
        digests=not no_digest,
        progress=progress,
        **as_they_are,
    )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)


def parse_size(text: str) -> int:
    """`5GB` (10⁹, as Hugging Face counts), `500MiB`, or plain bytes."""
    from converters.errors import ConfigError

    units = {"": 1, "B": 1}
    units |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
    units |= {f"{p}IB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
    number = text.rstrip("KMGTIBkmgtib ")
    unit = text[len(number) :].strip().upper()
    if unit not in units or not number.replace(".", "", 1).isdecimal() or float(number) <= 0:
        raise ConfigError(f"--shard-size {text!r} is no size", tries=["--shard-size 5GB", "--shard-size 500MiB"])
    return max(1, int(float(number) * units[unit]))


def _print(report) -> None:
    from converters.fold import fold_texts
    from converters.sizes import tell_bytes
    from titan_tools.console import count, non_finite

    def line(label: str, text: str) -> None:
        print(f"  {label:<9} {text}")

    took = "" if report.dry_run else f", {report.secs:.1f} s"
    print(f"{report.source} ({report.source_format}) to {report.destination} ({report.to})")
    line("model", report.model)
    line(
        "to write" if report.dry_run else "wrote",
        f"{count(report.num_tensors, 'tensor')}, {tell_bytes(report.num_bytes)} of {', '.join(report.dtypes)} in "
        f"{count(report.num_files, 'file')}{took}",
    )
    if report.needs:
        print_needs(line, report.needs)
    if report.resumed_bytes:
        line("resumed", f"{tell_bytes(report.resumed_bytes)} were written before, and are still good")
    if report.num_cast:
        line("cast", f"{count(report.num_cast, 'tensor')}{tell_rounding(report.relative_error)}")
    if report.kept_float32:
        line(
            "float32",
            f"stays for {count(len(report.kept_float32), 'tensor')}: {', '.join(fold_texts(report.kept_float32))}",
        )
    if report.other_files:
        line("with", ", ".join(report.other_files))
    for name, reason in report.dropped.items():
        line("dropped", f"{name}: {reason}")
    if report.left_out:
        sections, entries = ", ".join(report.left_out), count(sum(report.left_out.values()), "entry")
        kept = "; `titan reshard` keeps it" if report.source_format.startswith("dcp") else ""
        line("left out", f"{sections} ({entries}): only weights are converted{kept}")
    for name in report.missing:
        line("missing", f"{name}: not in the source, and so not in the output")
    for name in report.extra:
        line("extra", f"{name}: the model has no such tensor; not in the output")
    for remark in report.remarks:
        line("note", remark)
    for name, number in report.non_finite.items():
        line("beware", non_finite(name, number))


def tell_rounding(relative_error: Mapping[str, float]) -> str:
    """What casts did to the values, at worst; "" where nothing, or nothing yet."""
    if not relative_error:
        return ""
    worst = max(relative_error, key=relative_error.__getitem__)
    became_zero = ": some became zero" if relative_error[worst] == 1 else ""
    return f"; rounding changes values by at most {relative_error[worst]:.2g} of themselves ({worst}{became_zero})"


def print_needs(line, needs) -> None:
    """What a dry run tells besides what it would write."""
    from converters.sizes import tell_bytes

    line("memory", f"up to about {tell_bytes(needs.memory_bytes)}")
    free = f"{tell_bytes(needs.disk_bytes)}, {tell_bytes(needs.free_bytes)} are free"
    line("disk", free if needs.fits else f"does not fit: {free}")
    line("time", f"about {_tell_secs(needs.secs)} at {needs.bytes_per_sec / 1e9:.1f} GB/s; a slower disk sets the pace")


def _tell_secs(secs: float) -> str:
    if secs < 90:
        return f"{secs:.0f} s" if secs >= 10 else f"{secs:.1f} s"
    return f"{secs / 60:.0f} min" if secs < 5400 else f"{secs / 3600:.1f} h"
