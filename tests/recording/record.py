"""Compare today's behaviour with the recorded one: `python -m tests.recording.record [commands] [options] [folders]`.

It prints what differs and exits with 1 where exit codes, JSON keys, output bytes, options or resumed runs differ;
wording is not recorded. `--write` writes the recording anew. That is allowed only in a commit whose purpose is to
change the recorded behaviour (a new option, another file layout), and its message says which lines moved and why. A
refactoring never rewrites it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.recording.running import start_again_in_environment

HERE = Path(__file__).resolve().parent
MOST_LINES = 200
ABSENT = "absent"


def sections() -> dict[str, Any]:
    """Name → what records it in a new folder."""
    from tests.recording.commands import record_commands
    from tests.recording.folders import record_folders
    from tests.recording.options import record_options

    return {"options": lambda root: record_options(), "commands": record_commands, "folders": record_folders}


def recorded_file(name: str) -> Path:
    return HERE / "recorded" / f"{name}.json"


def dump(content: Any, indent: str = "") -> str:
    """JSON with one short object or list per line, so that a diff of two recordings is short."""
    inline = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, (dict, list)) or len(indent + inline) <= 110:
        return inline
    inner, is_dict = indent + " ", isinstance(content, dict)
    items = (
        [f"{json.dumps(key, ensure_ascii=False)}: {dump(value, inner)}" for key, value in content.items()]
        if is_dict
        else [dump(value, inner) for value in content]
    )
    opening, closing = "{}" if is_dict else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"


def difference(name: str, found: dict[str, Any]) -> str:
    """One line for each value that is not as recorded, with its case and key; "" where all are equal."""
    from tests.recording.folders import on_this_machine

    recorded = json.loads(recorded_file(name).read_text())
    found = json.loads(json.dumps(found))
    if name == "folders":
        found = on_this_machine(found, recorded)
    lines = list(changes(recorded, found))
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"… and {len(lines) - MOST_LINES} more lines"]
    return "\n".join(lines)


def changes(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Lines `case > key: recorded → found`; of lists what was removed and added."""
    if before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from changes(before.get(key, ABSENT), now.get(key, ABSENT), f"{place} > {key}" if place else key)
    elif isinstance(before, list) and isinstance(now, list):
        removed = [each for each in before if each not in now]
        added = [each for each in now if each not in before]
        yield f"{place}: removed {removed}, added {added}" if removed or added else f"{place}: {before} → {now}"
    else:
        yield f"{place}: {before!s:.300} → {now!s:.300}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", choices=[[], *sections()], help="default: all")
    parser.add_argument("--write", action="store_true", help="write the recording anew (see above)")
    arguments = parser.parse_args()
    start_again_in_environment("tests.recording.record")
    differs = False
    for name in arguments.section or sections():
        with tempfile.TemporaryDirectory(prefix="titan-recording-") as folder:
            found = sections()[name](Path(folder).resolve())
        if arguments.write:
            recorded_file(name).write_text(dump(found) + "\n")
        elif output := difference(name, found):
            print(f"{name} differ from the recording:\n{output}", flush=True)
            differs = True
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
