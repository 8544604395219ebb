"""Print the reports of `titan convert` and `titan reshard`."""

from collections.abc import Mapping

from converters.common.fold import fold_texts
from converters.common.sizes import format_bytes
from converters.conversion.records import Needs
from converters.convert import ConvertReport
from converters.families.rules import OTHER_MEDIUM
from converters.model.mtp import MTP_REASON
from converters.reshard import ReshardReport
from titan_tools.terminal.console import count, non_finite

_MOST_NAMES = 20  # of one kind, before they are folded


def print_conversion(report: ConvertReport) -> None:
    """Print what `titan convert` did."""
    took = "" if report.dry_run else f", {report.secs:.1f} s"
    print(f"{report.source} ({report.source_format}) to {report.destination} ({report.to})")
    _line("model", report.model)
    _line(
        "to write" if report.dry_run else "wrote",
        f"{count(report.num_tensors, 'tensor')}, {format_bytes(report.num_bytes)} of {', '.join(report.dtypes)} in "
        f"{count(report.num_files, 'file')}{took}",
    )
    if report.needs:
        _print_needs(report.needs)
    if report.resumed_bytes:
        _line("resumed", f"{format_bytes(report.resumed_bytes)} were written before, and are valid")
    if report.dequantized:
        _line(report.source_quantization, report.dequantized)
    if report.quantized:
        _line("quantized", report.quantized)
        _line("scales", _describe_scales(report))
    if report.num_cast:
        _line("cast", f"{count(report.num_cast, 'tensor')}{_describe_rounding(report.relative_error)}")
    if report.kept_float32:
        _line(
            "float32",
            f"stays for {count(len(report.kept_float32), 'tensor')}: {', '.join(fold_texts(report.kept_float32))}",
        )
    if report.other_files:
        _line("with", ", ".join(report.other_files))
    # notes count those of layers for multi-token prediction and of other media, which are many
    counted = (MTP_REASON, OTHER_MEDIUM)
    _print_reasons(
        "dropped", {name: reason for name, reason in report.dropped.items() if not reason.startswith(counted)}
    )
    _print_reasons("zeros", report.made)
    if report.left_out:
        sections, entries = ", ".join(report.left_out), count(sum(report.left_out.values()), "entry")
        advice = "; `titan reshard` keeps it" if report.source_format.startswith("dcp") else ""
        _line("left out", f"{sections} ({entries}): only weights are converted{advice}")
    for name in report.missing:
        _line("missing", f"{name}: not in the source, nor in the output")
    for name in report.extra:
        _line("extra", f"{name}: the model has no such tensor; not in the output")
    for remark in report.remarks:
        _line("note", remark)
    for name, number in report.non_finite.items():
        _line("warning", non_finite(name, number))


def print_resharding(report: ReshardReport) -> None:
    """Print what `titan reshard` did."""
    took = "" if report.dry_run else f", {report.secs:.1f} s"
    print(f"{report.source} to {report.destination}, sharded for {report.cut}")
    _line(
        "to write" if report.dry_run else "wrote",
        f"{count(report.num_tensors, 'tensor')} and {count(report.num_blobs, 'value')}, "
        f"{format_bytes(report.num_bytes)} in {count(report.num_files, 'file')}{took}",
    )
    if report.needs:
        _print_needs(report.needs)
    _line("sections", ", ".join(f"{section} ({number:,})" for section, number in report.sections.items()))
    if report.num_cast:
        rounding = _describe_rounding(report.relative_error)
        _line("cast", f"{count(report.num_cast, 'tensor')}; now {', '.join(report.dtypes)}{rounding}")
    if report.dropped_sections:
        entries = count(sum(report.dropped_sections.values()), "entry")
        _line("left out", f"{', '.join(report.dropped_sections)} ({entries}), as asked")
    for name, reason in report.dropped.items():
        _line("dropped", f"{name}: {reason}")
    for name in report.missing:
        _line("missing", name)
    for remark in report.remarks:
        _line("note", remark)
    if report.resumed_bytes:
        _line("resumed", f"{format_bytes(report.resumed_bytes)} were written before, and are valid")
    for name, number in report.non_finite.items():
        _line("warning", non_finite(name, number))


def _print_reasons(label: str, reasons: Mapping[str, str]) -> None:
    """One line for each name, or for the names of many layers together."""
    names = [f"{name}: {reason}" for name, reason in reasons.items()]
    for text in names if len(names) <= _MOST_NAMES else fold_texts(names):
        _line(label, text)


def _line(label: str, text: str) -> None:
    print(f"  {label:<9} {text}")


def _describe_rounding(relative_error: Mapping[str, float]) -> str:
    """The largest relative error of the casts; "" if all are exact or none was made yet."""
    if not relative_error:
        return ""
    worst = max(relative_error, key=relative_error.__getitem__)
    became_zero = ": some became zero" if relative_error[worst] == 1 else ""
    return f"; rounding changes values by at most {relative_error[worst]:.2g} of themselves ({worst}{became_zero})"


def _describe_scales(report: ConvertReport) -> str:
    """The number of scales of a quantized output, and of those that differ from another copy's."""
    if report.moved_scales is None:
        known = f"; compared with those of {report.scales_of}" if report.scales_of else ", not compared with others"
        return f"{count(report.num_scales, 'scale')}{known}"
    kept = report.num_scales - report.moved_scales
    return f"{count(report.num_scales, 'scale')}: {kept:,} as in {report.scales_of}, {report.moved_scales:,} moved"


def _print_needs(needs: Needs) -> None:
    """Print what a dry run estimates."""
    _line("memory", f"up to about {format_bytes(needs.memory_bytes)}")
    free = f"{format_bytes(needs.disk_bytes)}, {format_bytes(needs.free_bytes)} are free"
    _line("disk", free if needs.fits else f"does not fit: {free}")
    _line(
        "time", f"about {_format_secs(needs.secs)} at {needs.bytes_per_sec / 1e9:.1f} GB/s; longer with a slower disk"
    )


def _format_secs(secs: float) -> str:
    if secs < 90:
        return f"{secs:.0f} s" if secs >= 10 else f"{secs:.1f} s"
    return f"{secs / 60:.0f} min" if secs < 5400 else f"{secs / 3600:.1f} h"
