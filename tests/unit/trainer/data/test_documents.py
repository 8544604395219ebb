"""Samples of several documents: where each begins, what has no target, and whole documents packed by best fit."""

import json
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.common.errors import DataError
from trainer.config.sections import Config, Training
from trainer.data.datasets import check_dataset, register_dataset
from trainer.data.document_ends import with_end_token
from trainer.data.loader import TokenLoader
from trainer.data.packing import BestFit, best_fit_decreasing
from trainer.data.prepare import prepare
from trainer.data.sample import IGNORED, DocumentRules, window_sample
from trainer.data.samples import SourceSamples, Weighted
from trainer.data.virtual_stream import Position, VirtualStream

OFFSETS, EOS, PACKED = DocumentRules("offsets"), DocumentRules("eos", end_id=3), DocumentRules("offsets", "best_fit")
END = 3
LENGTHS = (5, 1, 12, 30, 0, 2, 9, 17, 4, 4, 21, 8, 3, 40)


@dataclass
class Documents:
    """Token number n is n + 10, but for the end of each document and one END inside of a text."""

    lengths: tuple[int, ...] = LENGTHS
    fingerprint: str = "f00d"
    vocab_size: int = 1000

    def tokens(self, split: str) -> np.ndarray:
        ids = np.arange(10, 10 + sum(self.lengths), dtype=np.uint16)
        ids[self.offsets(split)[1:][np.array(self.lengths) > 0] - 1] = END
        ids[20] = END
        return ids

    def offsets(self, split: str) -> np.ndarray:
        return np.cumsum((0, *self.lengths))


class Numbers(Documents):
    """Token number n is n + 10."""

    def tokens(self, split: str) -> np.ndarray:
        return np.arange(10, 10 + sum(self.lengths), dtype=np.uint16)


def loader(*, batch=2, rank=0, degree=1, seq_len=16, rules=OFFSETS, source=None, seed=7):
    rest = {"seq_len": seq_len, "global_batch_size": batch, "dp_rank": rank, "dp_degree": degree, "seed": seed}
    return TokenLoader(source or Documents(), "train", documents=rules, **rest)


def document_of(token: int) -> int:
    return int(np.searchsorted(Documents().offsets(""), token, "right")) - 1


# --- windows


def test_a_window_numbers_its_documents_and_the_last_token_of_each_has_no_target():
    sample = window_sample(np.arange(10, 19), np.array([0, 3, 4, 8]), OFFSETS)
    assert sample.documents.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert sample.tokens.tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert sample.targets.tolist() == [11, 12, IGNORED, IGNORED, 15, 16, 17, IGNORED]


def test_the_meaning_of_torchtitan_0_2_2_counts_every_target_and_ends_a_document_with_each_end_token():
    sample = window_sample(np.array([10, 3, 12, 3, 3, 15, 3]), np.array([0, 2]), EOS)
    assert sample.documents.tolist() == [0, 0, 1, 1, 2, 3]
    assert sample.targets.tolist() == [3, 12, 3, 3, 15, 3]


def test_without_masks_no_document_is_numbered():
    sample = window_sample(np.arange(10, 15), np.array([2]), DocumentRules())
    assert sample.documents is None and sample.targets.tolist() == [11, 12, 13, 14]


def test_windows_of_an_index_follow_its_offsets_and_not_end_tokens_in_a_text():
    samples, ids = SourceSamples(Documents(), "train", seq_len=16, seed=0, documents=OFFSETS), Documents().tokens("")
    seen = set()
    for place in range(samples.num_samples):
        number = samples._order[place]
        first, sample = 16 * number, samples.at(place)
        here = [document_of(first + n) for n in range(17)]
        assert np.unique(sample.documents, return_inverse=True)[1].tolist() == (
            np.unique(here[:-1], return_inverse=True)[1].tolist()
        )
        assert sample.documents[0] == 0 and (np.diff(sample.documents) >= 0).all()
        expected = [ids[first + n + 1] if here[n] == here[n + 1] else IGNORED for n in range(16)]
        assert sample.targets.tolist() == expected
        seen.add(number)
    assert seen == set(range((sum(LENGTHS) - 1) // 16))


def test_batches_count_real_targets_only():
    for batch in islice(loader(), 6):
        assert batch.documents.dtype == torch.int32 and batch.documents.shape == batch.tokens.shape == (2, 16)
        assert batch.num_units == int((batch.targets >= 0).sum()) < 32


def test_a_source_without_offsets_is_refused_and_needs_none_for_end_tokens():
    class WithoutOffsets:
        fingerprint, vocab_size, unigram_entropy = "f00d", 1000, None
        tokens = Documents().tokens

    with pytest.raises(DataError, match="does not say where its documents begin"):
        loader(source=WithoutOffsets())
    assert next(iter(loader(source=WithoutOffsets(), rules=EOS))).documents.max() > 0
    register_dataset("without_offsets", lambda path: WithoutOffsets())
    keys = {"split": "train", "vocab_size": 1000, "tokenizer": None}
    assert check_dataset("without_offsets", "x", **keys) == ""
    with pytest.raises(DataError, match=r"a method offsets\(split\)|does not say"):
        check_dataset("without_offsets", "x", **keys, needs_offsets=True)


@pytest.mark.parametrize("offsets", [[0, 5], [1, 156], [0, 90, 80, 156], [0]])
def test_offsets_that_do_not_cover_the_tokens_are_refused(offsets):
    class Wrong(Numbers):
        def offsets(self, split):
            return np.array(offsets)

    with pytest.raises(DataError, match="do not cover"):
        loader(source=Wrong())


def test_the_end_token_is_the_tokenizers(tmp_path):
    (tmp_path / "a.txt").write_text("some words of a text, " * 50)
    prepare([tmp_path / "a.txt"], tmp_path / "index", vocab_size=280, held_out=0.1)
    rules = with_end_token(DocumentRules("eos"), tmp_path / "index")
    samples = SourceSamples(_open(tmp_path / "index"), "train", seq_len=8, seed=0, documents=rules)
    assert rules.end_id == int(samples._tokens[-1])
    assert with_end_token(OFFSETS, tmp_path) == OFFSETS
    with pytest.raises(DataError, match="holds no tokenizer"):
        with_end_token(DocumentRules("eos"), tmp_path)


def _open(folder):
    from trainer.data.index import open_index

    return open_index(folder)


# --- streams


class Text:
    name, num_files = "text", 1

    def texts(self, file, *, skip=0):
        return iter(["abcd", "efghijklmnop", "q", "rstuv"][skip:])


def letters(text):
    return [1, *map(ord, text), 2]


@pytest.mark.parametrize("resumed_after", [0, 1, 2, 3])
def test_a_stream_knows_where_its_documents_begin_also_after_a_resume(resumed_after):
    def stream(position):
        made = VirtualStream(Text(), letters, 0, 1, seed=0, position=position)
        made.open()
        return made

    first = stream(Position())
    for _ in range(resumed_after):
        first.take(7)
    again = stream(first.position)
    for _ in range(5):
        window, begins = again.take(7)
        assert np.array_equal(window, first.take(7)[0])
        assert [place for place in range(1, 8) if window[place] == 1] == [place for place in begins if place]


# --- packs


def naive_rooms(lengths: list[int], size: int) -> list[int]:
    """Best fit decreasing, piece by piece: what is left in each pack."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        enough = [(room, number) for number, room in enumerate(rooms) if room >= length]
        if enough:
            rooms[min(enough)[1]] -= length
        else:
            rooms.append(size - length)
    return sorted(rooms)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.lists(st.integers(1, 30), min_size=1, max_size=50))
def test_packs_are_those_of_best_fit_decreasing(size, lengths):
    lengths = [min(length, size) for length in lengths]
    packs = best_fit_decreasing(np.bincount(lengths, minlength=size + 1).tolist(), size)
    assert sorted(size - sum(pack) for number, pack in packs for _ in range(number)) == naive_rooms(lengths, size)
    assert sorted(length for number, pack in packs for _ in range(number) for length in pack) == sorted(lengths)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 20), st.lists(st.integers(0, 60), min_size=1, max_size=40))
def test_every_token_but_a_documents_first_is_a_target_once(seq_len, lengths):
    offsets = np.cumsum((0, *lengths))
    packs = BestFit(offsets, seq_len)
    found = []
    for pack in range(len(packs)):
        pieces = packs.pieces(pack)
        assert 0 < sum(stop - start - 1 for start, stop in pieces) <= seq_len
        found += [token for start, stop in pieces for token in range(start + 1, stop)]
    documents = zip(offsets[:-1], offsets[1:], strict=True)
    assert sorted(found) == [token for start, stop in documents for token in range(start + 1, stop)]


def test_a_pack_holds_documents_and_padding_without_targets():
    data, seen = loader(rules=PACKED, batch=1, source=Numbers()), []
    assert data.num_samples == len(naive_rooms([4, 11, 29 % 16, 1, 8, 16, 3, 3, 20 % 16, 7, 2, 39 % 16], 16)) + 4
    for batch in islice(data, data.num_samples):
        tokens, targets, documents = batch.tokens[0], batch.targets[0], batch.documents[0]
        is_padding = targets == IGNORED
        assert (tokens[is_padding] == 0).all() and (documents[is_padding] == documents.max()).all()
        assert is_padding.sum() == 0 or int(documents[~is_padding].max()) == int(documents.max()) - 1
        assert torch.equal(targets[~is_padding], tokens[~is_padding] + 1)
        for number in documents[~is_padding].unique():
            here = tokens[documents == number].tolist()
            assert here == list(range(here[0], here[0] + len(here)))
            assert document_of(here[0] - 10) == document_of(here[-1] + 1 - 10)  # its last target is in the document
            seen += here
    assert len(seen) == len(set(seen)) == sum(max(length - 1, 0) for length in LENGTHS)


def read(count: int, *, degree: int, state: dict | None = None) -> list[list[list[int]]]:
    ranks = [loader(rules=PACKED, batch=4, rank=rank, degree=degree) for rank in range(degree)]
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(state)
    steps = zip(*(islice(rank, count) for rank in ranks), strict=True)
    return [[row for part in step for row in part.tokens.tolist()] for step in steps]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_packs_are_resumed_at_any_degree(degree):
    saved = loader(rules=PACKED, batch=4, rank=1, degree=2)
    list(islice(saved, 3))
    state = json.loads(json.dumps(saved.state_dict()))
    assert state == {"version": 1, "fingerprint": "f00d/train/best_fit/16", "seed": 7, "consumed_samples": 12}
    assert read(6, degree=degree, state=state) == read(9, degree=1)[3:]


MIXTURE = [Weighted("a", Documents(), 1.0), Weighted("b", Documents((30, 7, 50), "beef"), 1.0)]


@pytest.mark.parametrize("source", [Documents(), MIXTURE], ids=["one source", "mixture"])
@pytest.mark.parametrize(("then", "now"), [(PACKED, OFFSETS), (OFFSETS, PACKED)])
def test_a_resume_with_another_packing_is_refused(source, then, now):
    state = loader(rules=then, source=source).state_dict()
    for seq_len, command in ((16, ""), (8, " --training.seq_len 16")):
        with pytest.raises(DataError, match=f"begun with training.packing = {then.packing}") as error:
            loader(rules=now, source=source, seq_len=seq_len).load_state_dict(state)
        mask = " --training.document_mask offsets" if then is PACKED else ""
        assert error.value.tries[0] == f"--training.packing {then.packing}{mask}{command}"
    with pytest.raises(DataError, match="begun with seq_len 16, and is to be resumed with 8"):
        loader(rules=then, source=source, seq_len=8).load_state_dict(state)
    others = [replace(MIXTURE[0], source=Documents((30, 7, 50), "cafe")), MIXTURE[1]]
    with pytest.raises(DataError, match="is not that of the checkpoint"):
        loader(rules=now, source=others if source is MIXTURE else others[0].source).load_state_dict(state)


def test_a_mixture_packs_each_source():
    data = loader(source=MIXTURE, rules=PACKED)
    assert next(iter(data)).documents is not None


@pytest.mark.parametrize(
    ("rules", "fingerprint"),
    [
        (OFFSETS, "3c941e9c7c8a7f5d4ad6271a3a763b3b/train/16"),
        (PACKED, "f283325ab9c82a365e80dc35d9f78eca/train/16"),
    ],
)
def test_a_position_in_a_mixture_is_named_as_ever(rules, fingerprint):
    """Of checkpoints written before fingerprints could be computed for other packings."""
    state = {"version": 1, "fingerprint": fingerprint, "seed": 7, "consumed_samples": 4}
    resumed = loader(source=MIXTURE, rules=rules)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state


def test_defaults_read_as_before():
    assert (Config().training.document_mask, Training().packing) == (None, "concatenated")
    assert next(iter(loader(rules=DocumentRules()))).documents is None
