"""Console output: results to stdout, messages to stderr, progress bars only on a terminal."""

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from shutil import get_terminal_size
from typing import Any, TextIO

_NUMBER = r"[+-]?(\d[\d,]*(\.\d+)?(e[+-]?\d+)?|inf|nan)"
_LEAST_TEXT = 16  # characters, to which a column of text is folded
_NUMBERS = re.compile(rf"{_NUMBER}( … {_NUMBER})?( ?%| [KMGT]?i?B)?")


_STYLES = {
    "error": "bold red", "failed": "bold red", "FAILED": "bold red", "warning": "yellow", "changed": "yellow",
    "ok": "green", "hint": "cyan", "try": "cyan",
}  # fmt: skip


def note(text: str) -> None:
    """Print a message to stderr; it is not part of the result."""
    word, colon, rest = wrapped(text, sys.stderr).partition(":")
    print(f"{styled(word, sys.stderr)}{colon}{rest}", file=sys.stderr, flush=True)


def styled(word: str, stream: TextIO) -> str:
    """A word such as `error` in its colour, if `stream` is a terminal that shows colours (NO_COLOR, TERM)."""
    if word not in _STYLES or not stream.isatty():
        return word
    from rich.console import Console

    console = Console(file=stream)
    with console.capture() as captured:
        console.print(word, style=_STYLES[word], end="")
    return captured.get()


def wrapped(text: str, stream: TextIO, *, indent: int = 0) -> str:
    """`text` with line breaks between words, if `stream` is a terminal and a line is too long for it.

    `indent`: spaces before the continuation of a line, in addition to its own.
    """
    if not stream.isatty():
        return text
    wrapper = textwrap.TextWrapper(get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip()) + indent)
        lines.append(wrapper.fill(line) if len(line) > wrapper.width else line)
    return "\n".join(lines)


def print_error(kind: str, message: str, hint: str = "", tries: Sequence[str] = (), exit_code: int = 2) -> int:
    """Print an error to stderr, and with `--json` also as an object to stdout; returns the exit code."""
    tried = [f"try: {line}" for line in tries]
    for line in (f"error: {message}", *([f"hint: {hint}"] if hint else [])):
        note(line)
    for line in tries:  # a command is not wrapped, so that it can be copied
        print(f"{styled('try', sys.stderr)}: {line}", file=sys.stderr, flush=True)
    if prints_json():
        error = {
            "kind": kind,
            "message": message,
            "hint": "\n".join(filter(None, [hint, *tried])),
            "exit_code": exit_code,
        }
        with suppress(OSError):  # standard output may be the reason: it is full
            print_json({"error": error})
    return exit_code


def prints_json() -> bool:
    """Whether the command has `--json`; False on all but the first rank of torchrun, so that there is one object."""
    options = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    return "--json" in options and os.environ.get("RANK", "0") == "0"


def print_json(value: Any) -> None:
    """Print the JSON object of a `--json` run. NaN and infinity become null, which every JSON parser accepts.

    Indented, except that a list of numbers, and an object of numbers inside a list, take one line.
    """
    print("".join(_json_pieces(_finite(value), "\n")), flush=True)


def json_text(value: Any) -> str:
    """JSON for stdout; non-ASCII characters are escaped unless the encoding is UTF-8."""
    return json.dumps(value, ensure_ascii=not _stdout_is_utf8())


def stream(text: str) -> None:
    """Write text to stdout and flush; characters that the encoding lacks become question marks."""
    if not _stdout_is_utf8():
        text = text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)
    sys.stdout.write(text)
    sys.stdout.flush()


def _stdout_is_utf8() -> bool:
    return (sys.stdout.encoding or "utf-8").lower().replace("-", "").replace("_", "") == "utf8"


def _json_pieces(value: Any, line_end: str, *, is_item: bool = False) -> Iterator[str]:
    """`line_end`: a line feed and the indentation. `is_item`: whether the value is an item of a list."""
    if not isinstance(value, dict | list) or _fits_a_line(value, is_item=is_item):
        yield json_text(value)
        return
    is_dict, inner, comma = isinstance(value, dict), line_end + "  ", ""
    if isinstance(value, dict):
        items = [(f"{json_text(key)}: ", item) for key, item in value.items()]
    else:
        items = [("", item) for item in value]
    yield "{" if is_dict else "["
    for name, item in items:
        yield comma + inner + name
        yield from _json_pieces(item, inner, is_item=not is_dict)
        comma = ","
    yield line_end + ("}" if is_dict else "]")


def _fits_a_line(value: dict[str, Any] | list[Any], *, is_item: bool) -> bool:
    if isinstance(value, dict):
        return not value or (is_item and _are_all_numbers(value.values()))
    return _are_all_numbers(value)


def _are_all_numbers(values: Iterable[Any]) -> bool:
    """Numbers, null, true, false, and lists of them."""
    return all(
        not isinstance(value, str | dict) and (not isinstance(value, list) or _are_all_numbers(value))
        for value in values
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def count(number: int, what: str) -> str:
    """`1 file`, `2 files`, `1,000 entries`."""
    if number != 1:
        what = what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{number:,} {what}"


def non_finite(name: str, number: int) -> str:
    """The message for a tensor with NaN or infinite values."""
    return f"{name} holds {count(number, 'value')} that {'is' if number == 1 else 'are'} NaN or infinite"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, drop: Sequence[str] = ()) -> None:
    """Print rows under a header as plain text with aligned columns.

    Columns of numbers are right-aligned, including numbers with a unit and ranges: `1.5 … 2.0 GiB`. If a terminal is
    too narrow, the columns of `drop` are left out one after another, then text is folded. What is piped is whole.
    """
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    shown = list(range(len(columns)))
    widths = [max(len(columns[i]), *(len(row[i]) for row in cells), 0) for i in shown]
    right = [_are_numbers([row[i] for row in cells]) for i in shown]
    room = get_terminal_size().columns if sys.stdout.isatty() else None

    def is_too_wide(widths: Iterable[int]) -> bool:
        return room is not None and sum(width + 2 for width in widths) - 2 > room

    left_out = []
    for name in drop:
        if is_too_wide(widths[i] for i in shown):
            left_out.append(name)
            shown.remove(columns.index(name))
    if is_too_wide(widths[i] if right[i] else min(widths[i], _LEAST_TEXT) for i in shown):  # even if folded
        for row in cells:
            print("\n  ".join([row[0], *(f"{columns[i]}: {row[i]}" for i in shown[1:] if row[i])]))
    elif is_too_wide(widths[i] for i in shown):
        _print_folded(columns, cells, [(i, right[i], min(widths[i], _LEAST_TEXT)) for i in shown])
    else:
        for row in ([*columns], ["─" * width for width in widths], *cells):
            parts = (row[i].rjust(widths[i]) if right[i] else row[i].ljust(widths[i]) for i in shown)
            print("  ".join(parts).rstrip())
    if left_out:
        print(wrapped(f"left out at {room} columns: {', '.join(left_out)}; --json has all", sys.stdout))
    sys.stdout.flush()


def _print_folded(
    columns: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[tuple[int, bool, int]]
) -> None:
    """`shown`: the place of a column, whether it has numbers, and the width to which its text may be folded."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for column, is_number, least in shown:
        if is_number:
            grid.add_column(columns[column], justify="right", no_wrap=True)
        else:
            grid.add_column(columns[column], overflow="fold", min_width=least)
    for row in rows:
        grid.add_row(*(Text(row[column]) for column, _, _ in shown))
    size = get_terminal_size()  # rich takes 80 columns if TERM=dumb
    Console(file=sys.stdout, highlight=False, width=size.columns, height=size.lines).print(grid)


def _are_numbers(column: Sequence[str]) -> bool:
    """Whether all cells that are not empty are numbers."""
    return any(column) and all(_NUMBERS.fullmatch(cell) for cell in column if cell)


@contextmanager
def current_work() -> Iterator[Callable[[str], None]]:
    """Yields `say(text)`, which prints to stderr what is done now; on a terminal in one line, erased at the end.

    Without a thread, as a spinner has: a process that forks must have none.
    """
    from trainer.observability import status_line

    say = status_line.show if status_line.is_possible() else note
    try:
        yield lambda text: say(f"{text} …")
    finally:
        status_line.erase()


@contextmanager
def progress(total_bytes: int, what: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of bytes on a terminal. Yields `advance(num_bytes)`, which any thread may call."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


@contextmanager
def tally(total: int, what: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar of `total` items on a terminal. Yields `advance(num=1)`."""
    if not sys.stderr.isatty():
        yield lambda num=1: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num=1: bar.advance(task, num)
