"""What `titan reshard` prints of its report."""

from converters.reshard import ReshardReport
from converters.sizes import tell_bytes
from titan_tools.console import count, non_finite
from titan_tools.conversion import print_needs, tell_rounding


def print_report(report: ReshardReport) -> None:
    """The report in lines, the result first."""

    def line(label: str, text: str) -> None:
        print(f"  {label:<9} {text}")

    took = "" if report.dry_run else f", {report.secs:.1f} s"
    print(f"{report.source} to {report.destination}, cut for {report.cut}")
    line(
        "to write" if report.dry_run else "wrote",
        f"{count(report.num_tensors, 'tensor')} and {count(report.num_blobs, 'value')}, "
        f"{tell_bytes(report.num_bytes)} in {count(report.num_files, 'file')}{took}",
    )
    if report.needs:
        print_needs(line, report.needs)
    line("sections", ", ".join(f"{section} ({number:,})" for section, number in report.sections.items()))
    if report.num_cast:
        rounding = tell_rounding(report.relative_error)
        line("cast", f"{count(report.num_cast, 'tensor')}; now {', '.join(report.dtypes)}{rounding}")
    if report.dropped_sections:
        entries = count(sum(report.dropped_sections.values()), "entry")
        line("left out", f"{', '.join(report.dropped_sections)} ({entries}), as asked")
    for name, reason in report.dropped.items():
        line("dropped", f"{name}: {reason}")
    for name in report.missing:
        line("missing", name)
    for remark in report.remarks:
        line("note", remark)
    if report.resumed_bytes:
        line("resumed", f"{tell_bytes(report.resumed_bytes)} were written before, and are still good")
    for name, number in report.non_finite.items():
        line("beware", non_finite(name, number))
