"""Tables: alignment of numbers."""

from titan_tools.console import table


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
