"""Tables: alignment of numbers. Messages: colours and line breaks on a terminal."""

import io
import sys

import pytest

from titan_tools.terminal.console import note, print_error, styled, table, wrapped


def test_columns_of_numbers_are_aligned_to_the_right_with_units_and_ranges(capsys):
    rows = [
        ("one", 1, "0.50", "9.1 … 10.2", "512 B", "1%", "", "12", "1e-05"),
        ("two", 1000, "12.25", "-1.0 … +9.5", "1.5 MiB", "100%", "7", "too large", "nan"),
    ]
    table(("name", "n", "GiB", "range", "size", "share", "closed", "mixed", "x"), rows)
    header, rule, *lines = capsys.readouterr().out.splitlines()
    starts = [i for i, letter in enumerate(rule) if letter == "─" and (i == 0 or rule[i - 1] == " ")]
    ends = [*(start - 2 for start in starts[1:]), len(rule)]
    cells = [[line.ljust(len(rule))[a:b] for a, b in zip(starts, ends, strict=True)] for line in (header, *lines)]
    assert cells[0] == ["name", "    n", "  GiB", "      range", "   size", "share", "closed", "mixed    ", "    x"]
    assert cells[1] == ["one ", "    1", " 0.50", " 9.1 … 10.2", "  512 B", "   1%", "      ", "12       ", "1e-05"]
    assert cells[2] == ["two ", "1,000", "12.25", "-1.0 … +9.5", "1.5 MiB", " 100%", "     7", "too large", "  nan"]


def test_a_table_without_rows_is_its_header(capsys):
    table(("name", "size"), [])
    assert capsys.readouterr().out == "name  size\n────  ────\n"


ROWS = [("layers.0.attention.wq.weight", 1000, "values differ, and the first one is at [0, 0]", 1.5), ("b", 7, "", 2)]


def lines_at(monkeypatch, columns, rows=ROWS):
    """The lines of a table on a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", stream := Terminal())
    table(("name", "n", "detail", "relative"), rows, drop=("relative",))
    return stream.getvalue().splitlines()


def test_a_table_that_is_too_wide_for_a_terminal_loses_its_least_column_and_then_folds_text(monkeypatch):
    assert max(map(len, lines_at(monkeypatch, 95))) == 92 and len(lines_at(monkeypatch, 95)) == 4
    dropped = lines_at(monkeypatch, 85)
    assert dropped[2].startswith(f"{ROWS[0][0]}  1,000  {ROWS[0][2]}") and "relative" not in dropped[0]
    assert dropped[-1] == "left out at 85 columns: relative; --json has all"
    folded = lines_at(monkeypatch, 60)
    assert max(map(len, folded)) == 60 and "1,000" in folded[2] and len(folded) == 6
    at = folded[0].index("detail")
    assert " ".join(line[at:].strip() for line in folded[2:4]) == ROWS[0][2]


def test_a_row_takes_several_lines_where_folding_is_not_enough(monkeypatch):
    *lines, left_out, has_all = lines_at(monkeypatch, 38)
    assert lines == [ROWS[0][0], "  n: 1,000", f"  detail: {ROWS[0][2]}", "b", "  n: 7"]
    assert (left_out, has_all) == ("left out at 38 columns: relative;", "--json has all")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch) -> Terminal:
    """Standard error on a terminal of 40 columns with colours."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


MESSAGE = """a message of many words and a-path/that-is-longer/than-the-whole-terminal.toml
  one offender that is too long for it"""


def test_messages_have_colours_and_end_lines_between_words(monkeypatch):
    stream = terminal(monkeypatch)
    print_error("config", MESSAGE, "words", ["titan train a-config.toml --training.steps 1000"])
    assert stream.getvalue().splitlines() == [
        "\x1b[1;31merror\x1b[0m: a message of many words and",
        "a-path/that-is-longer/than-the-whole-terminal.toml",
        "  one offender that is too long for it",
        "\x1b[36mhint\x1b[0m: words",
        "\x1b[36mtry\x1b[0m: titan train a-config.toml --training.steps 1000",
    ]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_are_left_out_where_they_are_not_wanted(monkeypatch, name, value):
    stream = terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    note("hint: words")
    assert "\x1b[3" not in stream.getvalue() + styled("failed", stream)


def test_what_is_piped_is_plain(capsys):
    print_error("config", MESSAGE, "words", ["titan"])
    assert capsys.readouterr().err == f"error: {MESSAGE}\nhint: words\ntry: titan\n"
    assert wrapped(MESSAGE * 9, sys.stdout) == MESSAGE * 9 and styled("ok", sys.stdout) == "ok"
