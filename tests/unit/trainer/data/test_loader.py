"""Batches: the same samples in the same order for any data-parallel degree, exact resume, clear refusals."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from converters.common.errors import ConfigError, DataError, UnsupportedError
from converters.common.extensions import ExtensionError
from trainer.data import datasets
from trainer.data.datasets import check_dataset, open_dataset, register_dataset
from trainer.data.loader import TokenLoader
from trainer.data.prepare import prepare

ROOT = Path(__file__).resolve().parents[4]
SEQ_LEN = 4


@dataclass
class Tokens:
    """Token number n is n itself, so that a batch shows where it was cut."""

    num_tokens: int = 4 * 50 + 1
    vocab_size: int = 1000
    fingerprint: str = "f00d"
    unigram_entropy: float | None = None
    row: np.ndarray = field(init=False)

    def __post_init__(self):
        self.row = np.arange(self.num_tokens, dtype=np.uint16)

    def tokens(self, split: str) -> np.ndarray:
        return self.row


def loader(
    source=None, *, batch: int = 8, rank: int = 0, degree: int = 1, seed: int | None = 7, seq_len: int = SEQ_LEN
):
    return TokenLoader(
        source or Tokens(), "train", seq_len=seq_len, global_batch_size=batch, dp_rank=rank, dp_degree=degree, seed=seed
    )


def starts(batch) -> list[int]:
    """Which samples a batch holds."""
    return (batch.tokens[:, 0] // SEQ_LEN).tolist()


def global_batches(count: int, *, degree: int, batch: int = 8, state: dict | None = None) -> list[list[int]]:
    """What all ranks together read, in rank order."""
    ranks = [loader(rank=rank, degree=degree, batch=batch) for rank in range(degree)]
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(state)
    steps = zip(*(islice(rank, count) for rank in ranks), strict=True)
    return [[sample for part in step for sample in starts(part)] for step in steps]


def test_targets_are_the_tokens_one_later():
    for batch in islice(loader(), 20):
        assert batch.tokens.shape == batch.targets.shape == (8, SEQ_LEN)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.targets, batch.tokens + 1)
        assert batch.tokens.is_contiguous() and batch.targets.is_contiguous()
        assert batch.num_units == 32


def test_every_epoch_is_every_sample_once_in_another_order():
    read = [sample for batch in islice(loader(batch=10), 15) for sample in starts(batch)]
    epochs = [read[start : start + 50] for start in (0, 50, 100)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))


def test_seeds_give_other_orders_also_beyond_32_bits():
    orders = {tuple(starts(next(iter(loader(seed=seed))))) for seed in (0, 1, 2**32, 2**32 + 1, 2**63 - 1)}
    assert len(orders) == 5


def test_the_order_is_the_one_that_checkpoints_rely_on():
    """A Grain whose shuffle changed would silently repeat and leave out samples after a resume."""
    assert starts(next(iter(loader(batch=12, seed=42)))) == [32, 40, 9, 26, 17, 30, 13, 31, 45, 8, 36, 12]


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_any_degree_reads_the_same_global_batches(degree):
    assert global_batches(15, degree=degree) == global_batches(15, degree=1)


@pytest.mark.parametrize("degree", [1, 2, 8])
def test_a_state_saved_at_degree_4_resumes_at_any_degree(degree):
    saved = loader(rank=3, degree=4)
    list(islice(saved, 5))
    state = json.loads(json.dumps(saved.state_dict()))
    assert state == {"version": 1, "fingerprint": "f00d/train/4", "seed": 7, "consumed_samples": 40}
    assert global_batches(10, degree=degree, state=state) == global_batches(15, degree=1)[5:]


def test_another_batch_size_resumes_at_the_same_sample():
    state = loader().state_dict() | {"consumed_samples": 24}
    read = [sample for step in global_batches(4, degree=2, batch=6, state=state) for sample in step]
    whole = [sample for step in global_batches(6, degree=1) for sample in step]
    assert read == whole[24:48]


def test_the_state_counts_batches_handed_out_not_those_read_ahead():
    data = loader()
    batches = iter(data)
    for count in range(1, 5):
        next(batches)
        assert data.state_dict()["consumed_samples"] == 8 * count


def test_a_state_loaded_while_iterating_takes_effect():
    data = loader()
    batches = iter(data)
    first = starts(next(batches))
    next(batches)
    data.load_state_dict(data.state_dict() | {"consumed_samples": 0})
    assert starts(next(batches)) == first


def test_without_a_seed_there_is_one_pass_the_same_every_time():
    data = loader(batch=8, seed=None)
    first, second = ([starts(batch) for batch in data] for _ in range(2))
    assert first == second and len(first) == data.num_batches == 6
    read = [sample for batch in first for sample in batch]
    assert len(set(read)) == 48 and set(read) <= set(range(50))
    assert max(first[0]) - min(first[0]) > 25  # from all over the data, not from its first document
    halves = [[starts(batch) for batch in loader(batch=8, seed=None, rank=rank, degree=2)] for rank in range(2)]
    assert [left + right for left, right in zip(*halves, strict=True)] == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "begun with seed 8, and is to be resumed with seed 7"),
        ({"fingerprint": "beef/train/4"}, "fingerprint f00d/train/4 now, beef/train/4 then"),
        ({"fingerprint": "f00d/train/16"}, "begun with seq_len 16, and is to be resumed with 4"),
        ({"fingerprint": "f00d/held_out/4"}, "is not that of the checkpoint"),
        ({"version": 2}, "not one that this titan wrote"),
        ({"more": 1}, "not one that this titan wrote"),
        ({"consumed_samples": -1}, "damaged"),
        ({"consumed_samples": 1.5}, "damaged"),
        ({"consumed_samples": True}, "damaged"),
    ],
)
def test_a_state_of_another_run_is_refused_and_nothing_moves(change, message):
    data = loader()
    list(islice(data, 2))
    with pytest.raises(DataError, match=message):
        data.load_state_dict(data.state_dict() | change)
    assert data.state_dict()["consumed_samples"] == 16


def test_too_little_data_for_one_batch_is_reported():
    with pytest.raises(DataError, match="29 tokens, which is 7 samples of 4: too few for one batch of 8"):
        loader(Tokens(num_tokens=4 * 7 + 1))
    with pytest.raises(DataError, match="0 tokens"):
        loader(Tokens(num_tokens=0))
    assert loader(Tokens(num_tokens=4 * 8 + 1)).num_batches == 1


def test_a_token_beyond_the_vocabulary_is_reported_with_its_place():
    source = Tokens(vocab_size=300)
    source.row[77] = 300
    with pytest.raises(DataError, match="token 77 of the train part has id 300, but the vocabulary has 300"):
        list(islice(loader(source), 7))


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare([folder / "a.txt"], folder / "index", vocab_size=280, held_out=0.1)
    return folder / "index"


def test_a_prepared_index_is_read_window_by_window(index):
    source = open_dataset("tokens", str(index), vocab_size=280)
    for split in ("train", "held_out"):
        row = np.load(index / f"{split}_tokens.npy").astype(np.int64)
        data = TokenLoader(source, split, seq_len=16, global_batch_size=2, dp_rank=0, dp_degree=1, seed=None)
        read = [sample for batch in data for sample in torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1)]
        windows = [row[start : start + 17].tolist() for start in range(0, len(row) - 16, 16)]
        assert len(read) == 2 * data.num_batches > 2
        assert all(sample.tolist() in windows for sample in read)


def test_a_dataset_that_cannot_be_opened_is_reported(index, tmp_path):
    with pytest.raises(UnsupportedError, match="'pile': there is no such kind of data; there is tokens, c4_test"):
        open_dataset("pile", None, vocab_size=2048)
    with pytest.raises(DataError, match="'c4_test' needs dataset_path: a file or folder in C4's format"):
        open_dataset("c4_test", None, vocab_size=2048)
    with pytest.raises(DataError, match="needs dataset_path"):
        open_dataset("tokens", None, vocab_size=2048)
    with pytest.raises(ConfigError, match="is a token index of `titan data prepare`, not text"):
        check_dataset("jsonl", str(index), split="train", vocab_size=2048, tokenizer=index)
    with pytest.raises(DataError, match="is no folder"):
        open_dataset("tokens", str(tmp_path / "nowhere"), vocab_size=2048)
    with pytest.raises(DataError, match="go up to 279, but the model has 100 embedding rows"):
        open_dataset("tokens", str(index), vocab_size=100)


def test_a_dataset_of_the_users_own_is_opened_by_its_name(monkeypatch):
    monkeypatch.setattr(datasets, "_OPENERS", dict(datasets._OPENERS))
    register_dataset("mine", lambda path: Tokens(fingerprint=path))
    assert open_dataset("mine", "somewhere", vocab_size=1000).fingerprint == "somewhere"
    for name in ("tokens", "jsonl", "c4"):
        with pytest.raises(ExtensionError, match=f"{name!r} is built in"):
            register_dataset(name, lambda path: Tokens())


def test_grain_is_imported_without_its_warning_about_jax_and_logging_is_left_alone():
    code = (
        "import logging\nfrom trainer.data.samples import _import_grain\n_import_grain()\n"
        "print(logging.getLogger('absl').filters, logging.getLogger('absl').disabled)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""
    assert done.stdout.strip() == "[] False"
