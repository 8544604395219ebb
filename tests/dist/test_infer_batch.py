"""A batch on several ranks: the first alone knows what its file holds, and all make the same calls."""

import fcntl
import io
import json
import shutil
from contextlib import ExitStack, redirect_stderr, redirect_stdout

import pytest
import torch
import torch.distributed as dist

from converters.common.errors import ConfigError
from converters.source.weights import open_native
from tests.models.llama import write as write_llama
from titan_tools.infer import report
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.loading import prepare_work
from titan_tools.infer.model.load import load_model
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.request import Request
from titan_tools.infer.tasks.batch import prepare_batch
from titan_tools.infer.tasks.score import prepare_score

HEAD = "# What all of them begin with, longer than a copy takes\n"
LINES = [{"id": i, "prompt": f"{HEAD}def f{i}(" + "x" * (40 * i % 70)} for i in range(6)]


def continue_batch(folder, tp, score=False, held=False):
    """Do the batch of `folder` on this rank of `tp`; what it says of it. `held`: another process writes its file."""
    cpu, rank = torch.device("cpu"), dist.get_rank() if tp > 1 else 0
    sampled = Sampling(1.0, seed=3)
    asked = {"batch": folder / "in.jsonl", "out": folder / f"out{tp}.jsonl", "tp": tp}
    request = Request(folder, sampled, max_new_tokens=9, batch_size=4, **asked)
    if score:
        request = Request(folder, Sampling(), score=True, **asked)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if tp > 1:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(tp))
        with open_native(folder) as weights:
            work = prepare_work(request, weights)
            task = (prepare_score if score else prepare_batch)(work)
            model = load_model(weights.source, weights.info, dtype=torch.float32, device=cpu, tp=tp, rank=rank)
        if tp > 1:
            dist.barrier()  # ranks meet before the first one takes the file for itself
        if held and rank == 0:
            other = stack.enter_context(request.out.open("a"))
            fcntl.flock(other, fcntl.LOCK_EX)
        # a rank's own streams go where the first test of the session had them go
        talk = stack.enter_context(redirect_stderr(stack.enter_context(redirect_stdout(io.StringIO()))))
        ranks = TPRanks(tp, rank, cpu, dist.group.WORLD if tp > 1 else None)
        try:
            task.run(Engine(model, rows=task.rows, room=task.room) if task.rows else None, ranks)
        except ConfigError as error:
            return f"error: {error.message}"
        return talk.getvalue()


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama and the batch LINES."""
    write_llama(tmp_path)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


def leave(folder, content):
    """`content` as an earlier run of two ranks would have left it, or of one rank: that makes no difference."""
    (folder / "out2.jsonl").write_bytes(content)
    shutil.copy(folder / "out1.jsonl.settings.json", folder / "out2.jsonl.settings.json")


def test_ranks_go_on_where_the_file_ends(pools, folder):
    continue_batch(folder, 1)
    whole, out = (folder / "out1.jsonl").read_bytes(), folder / "out2.jsonl"
    lines = whole.splitlines(keepends=True)
    for left, output in (
        (b"", "skipped"),
        (lines[4] + lines[1] + lines[2][:30], "2 of 6 prompts are in"),
        (whole, "nothing to do"),
    ):
        leave(folder, left)
        talk = "".join(pools[2].run(continue_batch, folder, 2))
        assert out.read_bytes() == whole
        assert talk.count(output) == bool(left)  # reported once, not by each rank


def test_ranks_go_on_with_scores(pools, folder):
    """Also where nothing is left to score: of what was there before one rank knows alone."""
    table = continue_batch(folder, 1, score=True).splitlines()[2].split()
    lines, out = (folder / "out1.jsonl").read_bytes().splitlines(keepends=True), folder / "out2.jsonl"
    for left in (lines[4] + lines[1], b"".join(lines)):
        leave(folder, left)
        output, nothing = pools[2].run(continue_batch, folder, 2, True)
        found, expected = ([json.loads(line) for line in some] for some in (out.read_bytes().splitlines(), lines))
        assert [output["id"] for output in found] == [output["id"] for output in expected]
        assert [output["logprob"] for output in found] == pytest.approx(
            [output["logprob"] for output in expected], abs=1e-3
        )
        summed_up = next(row for row in map(str.split, output.splitlines()) if row[:1] == table[:1])
        assert [float(cell) for cell in summed_up] == pytest.approx([float(cell) for cell in table], rel=1e-4)
        assert nothing == ""


def test_what_keeps_the_first_rank_from_its_file_is_reported_by_all(pools, folder):
    for score in (False, True):
        first, other = pools[2].run(continue_batch, folder, 2, score, True)
        assert first == other == f"error: another titan infer is writing {folder / 'out2.jsonl'} now"


def most_memory():
    rank = dist.get_rank()
    before, report._peak_resident_bytes = report._peak_resident_bytes, lambda: 100 * (rank + 1)
    try:
        return report._peak_bytes(TPRanks(2, rank, torch.device("cpu")))
    finally:
        report._peak_resident_bytes = before


def test_memory_is_that_of_the_rank_that_held_most(pools):
    assert pools[2].run(most_memory) == [200, 200]
