"""Several sources with weights: exact shares, one order for any layout, and what a config cannot ask for."""

import json
from dataclasses import dataclass
from itertools import islice

import grain
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.common.errors import ConfigError, DataError
from converters.layout.mesh_shape import MeshShape
from trainer.config.load import load_config
from trainer.config.sections import Config, Dataloader, Training, Validation
from trainer.data.datasets import open_mixture
from trainer.data.kinds import data_problems, pinning_machine_problems
from trainer.data.loader import TokenLoader
from trainer.data.prepare import prepare
from trainer.data.samples import Weighted, place_in_mixture, whole_shares

SEQ_LEN = 4


@dataclass
class Tokens:
    """Ids that tell which source and sample they are of."""

    first: int
    num_samples: int
    vocab_size: int = 100_000
    unigram_entropy: float | None = None

    @property
    def fingerprint(self) -> str:
        return f"{self.first}+{self.num_samples}"

    def tokens(self, split: str) -> np.ndarray:
        return np.arange(self.first, self.first + SEQ_LEN * self.num_samples + 1, dtype=np.uint32)


SOURCES = [Tokens(0, 50), Tokens(10_000, 7), Tokens(20_000, 200)]


def mixture(*weights):
    named = zip("abc", SOURCES, weights, strict=False)
    return [Weighted(name, source, weight) for name, source, weight in named]


def loader(*, weights=(0.5, 0.2, 0.3), rank=0, degree=1, batch=20, seed=3):
    rest = {"seq_len": SEQ_LEN, "global_batch_size": batch, "dp_rank": rank, "dp_degree": degree, "seed": seed}
    return TokenLoader(mixture(*weights), "train", **rest)


def rows(degree, count, *, batch=20, state=None):
    ranks = [loader(rank=rank, degree=degree, batch=batch) for rank in range(degree)]
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(json.loads(json.dumps(state)))
    steps = zip(*(islice(rank, count) for rank in ranks), strict=True)
    return [[int(first) for part in step for first in part.tokens[:, 0]] for step in steps]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 300))
def test_shares_are_exact_at_any_time_and_places_follow_each_other(shares, start):
    counts = [0] * len(shares)
    for place in range(start):
        source, place_there = place_in_mixture(place, shares)
        assert place_there == counts[source]  # none is left out, none comes twice
        counts[source] += 1
    assert sum(counts) == start
    due = [start * share / sum(shares) for share in shares]
    assert all(abs(count - expected) < len(shares) for count, expected in zip(counts, due, strict=True))


@settings(deadline=None)
@given(st.permutations([1, 1, 2, 5, 12]), st.integers(1, 5), st.integers(0, 10**12))
def test_places_are_those_of_grains_mix_where_it_keeps_the_weights(multiples, count, place):
    """Grain rounds the weights, after dividing by the smallest: multiples of it stay what they are."""
    shares = [1, *multiples[1:count]]
    sources = [grain.MapDataset.range(1).repeat().map_with_index(lambda i, _, n=n: (n, i)) for n in range(len(shares))]
    assert tuple(grain.MapDataset.mix(sources, shares)[place]) == place_in_mixture(place, shares)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((0.7, 0.3), (7, 3)),
        ((70.0, 30.0), (7, 3)),
        ((1.0,), (1,)),
        ((0.1, 0.2), (1, 2)),
        ((1e-3, 1.0), (1, 1000)),
    ],
)
def test_weights_are_taken_as_they_are_written(weights, shares):
    assert whole_shares(weights) == shares


def test_a_batch_holds_each_source_by_its_weight_and_each_source_its_epochs():
    read = [row for batch in rows(1, 100) for row in batch]
    of_source = [[row for row in read if row // 10_000 == number] for number in range(3)]
    assert [len(part) for part in of_source] == [1000, 400, 600]
    for part, source in zip(of_source, SOURCES, strict=True):
        size, every = source.num_samples, sorted(source.first + SEQ_LEN * n for n in range(source.num_samples))
        epochs = [part[start : start + size] for start in range(0, len(part) - size + 1, size)]
        assert all(sorted(epoch) == every for epoch in epochs)
        assert len(epochs) < 2 or epochs[0] != epochs[1]


@pytest.mark.parametrize("degree", [2, 4])
def test_any_degree_reads_the_same_global_batches(degree):
    assert rows(degree, 12) == rows(1, 12)


@pytest.mark.parametrize("degree", [1, 2, 10])
def test_a_state_of_four_values_resumes_at_any_degree(degree):
    saved = loader(rank=3, degree=4)
    list(islice(saved, 5))
    state = saved.state_dict()
    assert state.keys() == {"version", "fingerprint", "seed", "consumed_samples"} and state["consumed_samples"] == 100
    assert rows(degree, 6, state=state) == rows(1, 11)[5:]


def test_other_weights_or_sources_are_another_run():
    state = loader().state_dict()
    loader(weights=(5.0, 2.0, 3.0)).load_state_dict(state)  # the same proportions
    for other in (loader(weights=(0.5, 0.3, 0.2)), loader(weights=(0.5, 0.5)), loader(weights=(1.0,))):
        with pytest.raises(DataError, match="is not that of the checkpoint"):
            other.load_state_dict(state)
    with pytest.raises(DataError, match="begun with seed 3"):
        loader(seed=4).load_state_dict(state)


def test_a_source_without_one_sample_is_reported_by_its_name():
    parts = [*mixture(1.0), Weighted("empty", Tokens(0, 0), 1.0)]
    rest = {"seq_len": SEQ_LEN, "global_batch_size": 2, "dp_rank": 0, "dp_degree": 1, "seed": 0}
    with pytest.raises(DataError, match="empty: the train part has 1 tokens, which is 0 samples of 4"):
        TokenLoader(parts, "train", **rest)


def test_sources_of_different_tokenizers_are_refused(tmp_path):
    for name, text in (("a", "one text " * 300), ("b", "another one, of other words; " * 100)):
        (tmp_path / f"{name}.txt").write_text(text)
        prepare([tmp_path / f"{name}.txt"], tmp_path / name, vocab_size=270, held_out=0.1)
    prepare([tmp_path / "b.txt"], tmp_path / "c", tokenizer=tmp_path / "a", held_out=0.1)
    paths = {name: str(tmp_path / name) for name in "abc"}
    with pytest.raises(DataError, match="were made with different tokenizers") as caught:
        open_mixture("tokens", [(paths["a"], 1.0), (paths["b"], 1.0)], vocab_size=270)
    assert caught.value.tries == (f"titan data prepare … --tokenizer {paths['a']}",)
    (tmp_path / "hf").mkdir()  # the same tokenizer in one of its two forms
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / "hf" / name).write_bytes((tmp_path / "a" / name).read_bytes())
    prepare([tmp_path / "b.txt"], tmp_path / "d", tokenizer=tmp_path / "hf", held_out=0.1)
    assert open_mixture("tokens", [(paths["a"], 1.0), (str(tmp_path / "d"), 3.0)], vocab_size=270)
    opened = open_mixture("tokens", [(paths["a"], 1.0), (paths["c"], 3.0)], vocab_size=270)
    assert [(part.name, part.weight) for part in opened] == [(paths["a"], 1.0), (paths["c"], 3.0)]


def test_a_mixture_is_written_in_toml_or_on_the_command_line(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[training]\ndataset_mix = [["data/web", 0.7], ["data/code", 3]]\n')
    assert load_config(path).training.dataset_mix == (("data/web", 0.7), ("data/code", 3.0))
    typed = load_config(path, ["--training.dataset_mix", '[["a", 1]]', "--training.dataloader.pin_memory"])
    assert typed.training.dataset_mix == (("a", 1.0),) and typed.dataloader.pin_memory
    for wrong in ('[["a"]]', '[["a", 0]]', '[["a", -1.0]]', '["a", 0.7]', '[["a", 0.5, 3]]', '[["", 1]]', "a:0.7"):
        with pytest.raises(ConfigError, match="a list of 2: a folder, not an empty string or a URI, then a number > 0"):
            load_config(path, ["--training.dataset_mix", wrong])


@pytest.mark.parametrize(
    ("training", "validation", "batch", "message"),
    [
        (
            {"dataset_path": "a", "dataset_mix": (("b", 1.0),)},
            {},
            1,
            "and training.dataset_mix are both set",
        ),
        ({"dataset": "c4", "dataset_mix": (("b", 1.0),)}, {}, 1, "c4 is streamed"),
        ({"dataset_mix": (("b", 1.0), ("b", 2.0))}, {}, 1, "dataset_mix names b twice"),
        (
            {"dataset": "c4", "dataset_streams": 64},
            {},
            3,
            "degree of 3; degrees that divide it: 1, 2, 4, 8, 16, 32, 64",
        ),
        ({"dataset": "c4", "dataset_streams": 12}, {}, 8, "degrees that divide it: 1, 2, 3, 4, 6, 12"),
        ({}, {"dataset": "c4"}, 1, "would take weeks: set validation.steps"),
        (
            {"dataset": "jsonl", "dataset_path": "a"},
            {"dataset": "jsonl", "dataset_path": "a"},
            1,
            "reads a, which",
        ),
        (
            {"dataset": "text", "dataset_mix": (("b", 1.0),)},
            {"dataset": "text", "dataset_path": "b"},
            1,
            "validation reads b, which is trained on",
        ),
        (
            {},
            {"dataset": "text", "dataset_path": "a", "dataset_mix": (("b", 1.0),)},
            1,
            "validation.dataset_mix are both",
        ),
    ],
)
def test_what_cannot_be_is_reported_with_the_layouts_problems(training, validation, batch, message):
    config = Config(training=Training(**training), validation=Validation(enable=bool(validation), **validation))
    (problem,) = data_problems(config.training, config.validation, MeshShape(dp_shard=batch))
    assert message in problem


def test_what_can_be_is_not_complained_of():
    streamed = Training(dataset="c4")
    same = Training(dataset="tokens", dataset_path="a"), Validation(enable=True, dataset="tokens", dataset_path="a")
    assert data_problems(streamed, Validation(enable=True), MeshShape(dp_shard=64)) == []
    assert data_problems(*same, MeshShape(dp_shard=3)) == []
    assert data_problems(streamed, Validation(dataset="c4"), MeshShape()) == []


def test_pinned_memory_is_asked_of_torch_and_refused_without_a_gpu(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    source = {"seq_len": SEQ_LEN, "global_batch_size": 4, "dp_rank": 0, "dp_degree": 1, "seed": 0}
    batch = next(iter(TokenLoader(SOURCES[0], "train", pin_memory=True, **source)))
    assert any(batch.tokens is tensor for tensor in pinned) and any(batch.targets is tensor for tensor in pinned)
    on, off = Dataloader(pin_memory=True), Dataloader()
    assert pinning_machine_problems(on, on, torch.device("cuda", 0)) == []
    assert pinning_machine_problems(on, on, torch.device("cpu")) == [
        "training.dataloader.pin_memory needs a GPU to copy batches to",
        "validation.dataloader.pin_memory needs a GPU to copy batches to",
    ]
    assert pinning_machine_problems(off, off, torch.device("cpu")) == []
