#!/usr/bin/env python3
"""Compare estimates with published peaks of torchtitan runs: print a table, write it; exit 1 beyond the limits.

Rows that are not covered are listed with the reason; a row that cannot be read does not stop the others.

    python scripts/validate_memory.py ../shared/data/memory_published.csv tests/published_memory/experts.csv \
        --write docs/memory_validation.md

How it works: tests/published_memory.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from converters.common.errors import TitanError, UnsupportedError
from tests.published_memory.measure import estimate
from tests.published_memory.rows import RejectedRow, Row, read_rows
from tests.published_memory.table import document, markdown, score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="CSV file of published rows")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file to write the comparison to")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows to look at; all if left out")
    given = parser.parse_args()
    rows: list[Row] = []
    refused: list[RejectedRow] = []
    for table in given.tables:
        try:
            more, unread = read_rows(table.read_text())
        except (OSError, UnicodeDecodeError, TitanError) as error:
            parser.error(f"{table}: {error}")
        rows += more
        refused += unread
    if unknown := set(given.only or ()) - {each.id for each in (*rows, *refused)}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    rows, refused = ([each for each in some if not given.only or each.id in given.only] for some in (rows, refused))
    for each in refused:
        print(f"{each.id}: {each.run}: {each.why}", file=sys.stderr)
    estimates = []
    for row in rows:
        try:
            estimates.append(estimate(row))
            message = f"{estimates[-1].high_gib:.2f} GiB"
        except Exception as error:  # continue with the other rows
            message = error.message if isinstance(error, TitanError) else f"{type(error).__name__}: {error}"
            refused.append(RejectedRow(row.id, row.run, message, row.is_scored, isinstance(error, UnsupportedError)))
        print(f"{row.id}: {row.run}: {message}", file=sys.stderr, flush=True)
    print(markdown(estimates, refused), end="")
    if given.write:
        given.write.write_text(document(estimates, refused))
    return 0 if score(estimates, refused).is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
