"""What README states is measured again (slow set): equalities hold, and memory and estimates are those of the page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads((ROOT / "docs" / "measured.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_measurements_of_the_readme_can_be_repeated(tmp_path):
    out = tmp_path / "measured.json"
    bench = [
        sys.executable,
        ROOT / "scripts" / "bench" / "readme.py",
        "--rounds",
        "1",
        "--json",
        out,
        "--work",
        tmp_path,
    ]
    done = subprocess.run(bench, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found.keys() == RECORDED.keys()
    assert found["fp8"]["different"] == found["greedy"]["different"] == 0
    for part, number in (("fp8", "tensors"), ("greedy", "tokens")):
        assert found[part][number] == RECORDED[part][number]
    for name in ("published", "405b"):
        expected = RECORDED["estimates"][name]["reserved_gib"]
        assert found["estimates"][name]["reserved_gib"] == pytest.approx(expected, rel=0.01)
    memory = found["conversion"]["peak_mib"]
    assert memory["titan"] < min(160, memory["transformers"], memory["torchtitan"] / 20)
