#!/usr/bin/env python3
"""Published peaks of torchtitan runs against the estimate: prints the table, writes it, exits 1 where it is not good.

    python scripts/validate_memory.py ../shared/data/memory_published.csv --write docs/memory_validation.md

How it works: titan_tools/memory/published.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from converters.errors import TitanError
from titan_tools.memory.published.measure import estimate
from titan_tools.memory.published.rows import read_rows
from titan_tools.memory.published.table import document, markdown, score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="CSV file of published rows")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file to write the comparison to")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows to look at; all if left out")
    given = parser.parse_args()
    rows = read_rows(given.table.read_text())
    estimates, refused = [], []
    for row in rows:
        if given.only and row.id not in given.only:
            continue
        try:
            estimates.append(estimate(row))
            print(f"{row.id}: {row.run}: {estimates[-1].high_gib:.2f} GiB", file=sys.stderr)
        except TitanError as error:
            refused.append((row, error.message))
            print(f"{row.id}: {row.run}: {error.message}", file=sys.stderr)
    print(markdown(estimates, refused), end="")
    if given.write:
        given.write.write_text(document(estimates, refused))
    return 0 if score(estimates, refused).is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
