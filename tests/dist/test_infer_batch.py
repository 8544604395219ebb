"""A batch on several ranks: the first alone knows what its file holds, and all make the same calls."""

import io
import json
from contextlib import redirect_stderr

import pytest
import torch
import torch.distributed as dist

from converters.weights import open_native
from tests.tiny_llama import write_llama
from titan_tools.infer import report
from titan_tools.infer import run as infer_run
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.model.load import load_model
from titan_tools.infer.ranks import Ranks
from titan_tools.infer.request import Request
from titan_tools.infer.tasks.batch import prepare_batch
from titan_tools.infer.tasks.score import prepare_score

LINES = [{"id": i, "prompt": f"def f{i}(" + "x" * (40 * i % 70)} for i in range(6)]


def continue_batch(folder, tp, score=False):
    """Do the batch of `folder` on this rank of `tp`; what it says of it."""
    cpu, rank = torch.device("cpu"), dist.get_rank() if tp > 1 else 0
    sampled = Sampling(1.0, seed=3)
    asked = {"batch": folder / "in.jsonl", "out": folder / f"out{tp}.jsonl", "tp": tp}
    request = Request(folder, sampled, max_new_tokens=9, batch_size=4, **asked)
    if score:
        request = Request(folder, Sampling(), score=True, **asked)
    with open_native(folder) as weights:
        work = infer_run._look(request, weights)
        task = (prepare_score if score else prepare_batch)(work)
        model = load_model(weights.source, weights.info, dtype=torch.float32, device=cpu, tp=tp, rank=rank)
    if tp > 1:
        dist.barrier()  # ranks meet before the first one takes the file for itself
    with redirect_stderr(io.StringIO()) as talk:  # a rank's own goes where the first test of the session had it go
        task.run(Engine(model, rows=task.rows, room=task.room), Ranks(tp, rank, cpu))
    return talk.getvalue()


def test_ranks_go_on_where_the_file_ends(pools, tmp_path):
    write_llama(tmp_path)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    continue_batch(tmp_path, 1)
    whole, out = (tmp_path / "out1.jsonl").read_bytes(), tmp_path / "out2.jsonl"
    lines = whole.splitlines(keepends=True)
    for left, num_told in ((b"", 0), (lines[4] + lines[1] + lines[2][:30], 1)):
        out.write_bytes(left)
        talk = "".join(pools[2].run(continue_batch, tmp_path, 2))
        assert out.read_bytes() == whole
        assert talk.count("skipped") == num_told  # told once, not by each rank


def test_ranks_go_on_with_scores(pools, tmp_path):
    write_llama(tmp_path)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    continue_batch(tmp_path, 1, score=True)
    lines, out = (tmp_path / "out1.jsonl").read_bytes().splitlines(keepends=True), tmp_path / "out2.jsonl"
    out.write_bytes(lines[4] + lines[1])
    pools[2].run(continue_batch, tmp_path, 2, True)
    found, expected = ([json.loads(line) for line in some] for some in (out.read_bytes().splitlines(), lines))
    assert [told["id"] for told in found] == [told["id"] for told in expected]
    assert [told["logprob"] for told in found] == pytest.approx([told["logprob"] for told in expected], abs=1e-3)


def most_memory():
    rank = dist.get_rank()
    before, report._peak_resident_bytes = report._peak_resident_bytes, lambda: 100 * (rank + 1)
    try:
        return report._peak_bytes(Ranks(2, rank, torch.device("cpu")))
    finally:
        report._peak_resident_bytes = before


def test_memory_is_that_of_the_rank_that_held_most(pools):
    assert pools[2].run(most_memory) == [200, 200]
