"""From a run's folder to a step: what can be read only once is read for the step that is whole."""

import os
import shutil
from contextlib import contextmanager

import pytest

from converters.store.location import locate
from converters.tokenizers.assets import find_assets
from tests.doors import convert
from tests.json_lines import read_lines
from titan_tools.infer.find import FoundCheckpoint, find_checkpoints, find_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(hf, tmp_path):
    """A run's folder: step-20 looks whole and is damaged, step-15 has lost a file, step-10 is whole."""
    convert(hf, tmp_path / "run" / "step-10", to="dcp")
    for step in (15, 20):
        shutil.copytree(tmp_path / "run" / "step-10", tmp_path / "run" / f"step-{step}")
    (tmp_path / "run" / "step-15" / ".metadata").unlink()
    file = next((tmp_path / "run" / "step-20").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return tmp_path / "run"


@contextmanager
def pipe_of(text):
    """A path at which `text` can be read once."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    try:
        yield f"/dev/fd/{reader}"
    finally:
        os.close(reader)


def test_a_step_is_reported_with_what_was_skipped_since_the_last(run):
    found = list(zip(range(2), find_checkpoints(run), strict=False))
    assert [one for _, one in found] == [
        FoundCheckpoint(locate(run / "step-20"), True),
        FoundCheckpoint(locate(run / "step-10"), True, ("step-15: it has no .metadata",)),
    ]
    assert [*find_checkpoints(run / "step-20")] == [FoundCheckpoint(locate(run / "step-20"))]


def test_a_batch_from_a_pipe_outlives_a_damaged_step(titan, run):
    with pipe_of('{"id": 7, "prompt": "def main("}\n') as batch:
        code, out, err = titan("infer", run, "--batch", batch, "--max-new-tokens", "3")
    assert code == 0, err
    assert [line["id"] for line in read_lines(out)] == [7]
    assert f"skipping a damaged step: {run / 'step-20'}" in err and f"reading {run / 'step-10'}\n" in err


def test_prompts_that_cannot_be_are_reported_before_a_step_is_read(titan, run, untouched, tmp_path):
    (tmp_path / "in").write_text('{"id": 7, "prompt": ""}\n')
    for batch, said in ((tmp_path / "in", "line 1 (id 7)"), (tmp_path / "missing", "cannot read the batch")):
        code, out, err = titan("infer", run, "--batch", batch)
        assert (code, out) == (2, "") and err.startswith("error: ") and said in err


def test_the_checkpoint_s_own_tokenizer_comes_first(hf, tmp_path):
    own, other = find_assets(hf), shutil.copytree(hf, tmp_path / "other")
    assert find_tokenizer(hf, None, own) == find_tokenizer(hf, other, own) == hf
    (other / "chat_template.jinja").write_text("{{ messages }}")  # what the checkpoint lacks beside the same tokenizer
    assert find_tokenizer(hf, other, own) == other
    (other / "tokenizer.json").rename(other / "tokenizer.model")  # nothing says that it is the same
    assert find_tokenizer(hf, other, own) == hf
    assert find_tokenizer(tmp_path, other, {}) == other
    assert find_tokenizer(hf, other, {}) == other  # a torch file among files of something else
