"""docs/json.md lists the keys of every `--json` output: those that are recorded, and of outputs that are made here."""

import json
import re
import shutil
from pathlib import Path

import pytest

from converters.integrity.verify_report import Changes, VerifyReport
from tests.recording.commands import command_lines
from tests.recording.record import recorded_file
from tests.recording.running import json_keys
from titan_tools.hub.download import DownloadReport
from titan_tools.hub.targets import RemoteFile

PAGE = Path(__file__).resolve().parents[3] / "docs" / "json.md"


def documented() -> dict[str, list[str]]:
    """The keys of the tables, by the command that a section's heading names first; Errors: "error"."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"(?m)^## ", PAGE.read_text())[1:]:
        heading = section.splitlines()[0]
        command = heading.strip("`").split()[1] if heading.startswith("`titan") else "error"
        table = re.search(r"(?m)^\| key .*\n\|---.*\n((\|.*\n)+)", section)
        while table:
            for row in table[1].splitlines():
                found.setdefault(command, []).extend(re.findall(r"`([^`]+)`", row.split(" | ")[0]))
            section = section[table.end() :]
            table = re.search(r"(?m)^\| key .*\n\|---.*\n((\|.*\n)+)", section)
    return found


def as_pattern(key: str) -> re.Pattern[str]:
    """`*` is one or more names. A key's parents count as documented, and `[]` at its end says that it is a list."""
    names = re.escape(key.removesuffix("[]")).replace(r"\*", r".+")
    return re.compile(names)


def outputs(titan, hf, tmp_path) -> dict[str, set[str]]:
    """Command → keys of its real outputs."""
    recorded = json.loads(recorded_file("commands").read_text())
    found: dict[str, set[str]] = {}
    for name, arguments in command_lines():
        if isinstance(keys := recorded[name].get("json"), list):
            found.setdefault("error" if "error" in keys else arguments[0], set()).update(keys)
    download = DownloadReport("a/b", "main", "c", "d", (RemoteFile("f", 1, "e"),), 1, 1, 0.1, ("f",), ("f",), ("g",))
    accepted = VerifyReport("a", "dcp", (), 1, 1, {}, Changes({"f": "d"}, {"t": "d"}, 1))
    run = tmp_path / "run"
    run.mkdir()
    run.joinpath("metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "validation_loss": 2.0}\n')
    run.joinpath("checkpoint", "step-1").mkdir(parents=True)
    run.joinpath("checkpoint", "step-1", ".metadata").touch()
    scored = tmp_path / "scored.jsonl"
    scored.write_text('{"id": 1, "prompt": "ab", "completion": " c"}\n')
    words = ("infer", hf, "--json", "--max-new-tokens", "2", "--prompt", "a", "--logprobs", "1")
    made = [
        ("--version", json.loads(titan("--version", "--json").stdout)),
        ("download", download.to_json()),
        ("verify", accepted.to_json()),
        ("inspect", json.loads(titan("inspect", run, "--json").stdout)),
        (
            "inspect",
            json.loads(
                titan(
                    "inspect", run, shutil.copytree(run, tmp_path / "run2"), "--plot", tmp_path / "runs.png", "--json"
                ).stdout
            ),
        ),
        ("infer", json.loads(titan(*words).stdout)),
        ("infer", json.loads(titan(*words, "--samples", "2", "--temperature", "1").stdout)),
        ("infer", json.loads(titan("infer", hf, "--json", "--score", "--batch", scored).stdout)),
    ]
    for command, content in made:
        found.setdefault(command, set()).update(json_keys(json.loads(json.dumps(content))))
    return found


@pytest.fixture(scope="module")
def page():
    return documented()


def test_the_page_lists_the_keys_of_every_output_and_no_others(titan, hf, tmp_path, page):
    real = outputs(titan, hf, tmp_path)
    assert real.keys() == page.keys()
    for command, keys in real.items():
        patterns = {key: as_pattern(key) for key in page[command]}
        missing = {
            key
            for key in keys
            if not any(p.fullmatch(key) for p in patterns.values())
            and not any(known.startswith((f"{key}.", f"{key}[]")) for known in patterns)
        }
        assert missing == set(), f"{command}: keys that docs/json.md does not list"
        gone = {key for key, p in patterns.items() if not any(p.fullmatch(known) for known in keys)}
        rare = {key for key in gone if key.endswith(".*") and key.removesuffix(".*") in keys}  # empty in these outputs
        assert gone == rare, f"{command}: keys that no output has"
