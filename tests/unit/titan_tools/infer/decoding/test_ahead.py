"""A step is launched before the result of the one before it is read: on a GPU that a CPU stands for here."""

from types import SimpleNamespace

import pytest
import torch

from converters.common.errors import CheckpointError
from tests.models.llama import write as write_llama
from tests.tiny_infer import load
from tests.watched_engine import ragged, run
from titan_tools.infer.decoding import static_decode
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Timings
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.decoding.static_decode import StaticDecoder
from titan_tools.infer.decoding.steps import StaticDecode

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return load(folder)


@pytest.fixture
def events(monkeypatch):
    """What the host asks of the GPU: "fill" the input of a step, "launch" one, "read" its result."""
    events, record, fill = [], StaticDecoder._record, StaticDecode.fill

    def recorded(self, step, lengths):
        self._records = False
        run = record(self, step, lengths)
        self._records = True
        events.clear()  # what was filled to warm up

        def replay():
            events.append("launch")
            return run()

        return replay

    def filled(self, tokens, lengths):
        events.append("fill")
        fill(self, tokens, lengths)

    def start_reading(found_2B):
        return found_2B.clone(), SimpleNamespace(synchronize=lambda: events.append("read"))

    monkeypatch.setattr(static_decode, "SHORTEST", 16)
    monkeypatch.setattr(StaticDecoder, "_record", recorded)
    monkeypatch.setattr(StaticDecode, "fill", filled)
    monkeypatch.setattr(static_decode, "_start_reading", start_reading)
    return events


def gpu_engine(model, **options):
    engine = Engine(model, static=True, **options)
    engine._static._records = True
    return engine


def test_each_token_is_read_once_after_the_next_step_was_launched(model, events):
    timings, prompt = Timings(), [list(range(20))]
    expected, _ = run(Engine(model, rows=1, room=64), prompt, max_new_tokens=10)
    engine = gpu_engine(model, rows=1, room=64)
    found, _ = run(engine, prompt, timings=timings, max_new_tokens=10)
    assert found == expected
    assert events == ["fill", "launch", *["launch", "read"] * 8, "read"]  # the first token is the prefill's
    assert events.count("read") == timings.num_decode_steps == timings.num_tokens - 1
    assert engine.held == [[*prompt[0], *expected[0, 0][0][:-1]]]


def test_a_longer_shape_begins_with_what_was_read(model, events):
    """From 12 to 60 tokens: steps of 16, 32 and 60 keys."""
    prompt = [list(range(12))]
    expected, _ = run(Engine(model, rows=1, room=60), prompt, max_new_tokens=48)
    engine = gpu_engine(model, rows=1, room=60)
    found, _ = run(engine, prompt, max_new_tokens=48)
    assert found == expected and len(engine._static._steps) == 3


STOPS = {"stop_ids": frozenset(range(0, 301, 7))}


@pytest.mark.parametrize(
    ("rows", "settings", "most_lost"),
    [
        (1, STOPS, 8),  # a step at each end
        (3, STOPS, 1),  # at the end of the last one, which is alone
        (3, {}, 8),
        (3, {"samples": 2}, 16),
        (1, {"logprobs": 2}, None),
        (2, {"sampling": Sampling(repetition_penalty=1.3)}, None),
        (2, {"sampling": Sampling(0.9, top_k=50, top_p=0.9, seed=3)}, None),
    ],
    ids=["one row", "stops", "limits", "samples", "logprobs", "penalty", "seed"],
)
def test_sequences_are_those_of_a_cpu_in_the_same_order(model, events, rows, settings, most_lost):
    prompts = ragged(8, 20, seed=2)
    expected = run(Engine(model, rows=rows, room=48), prompts, max_new_tokens=16, **settings)
    engine = gpu_engine(model, rows=rows, room=48)
    assert run(engine, prompts, max_new_tokens=16, **settings) == expected
    events.clear()  # of shapes that were recorded on the way, some are missing
    assert run(engine, prompts, max_new_tokens=16, **settings) == expected
    assert ("read" in events) == (most_lost is not None)
    if most_lost is not None:
        assert 0 <= events.count("launch") - events.count("read") <= most_lost


@pytest.mark.parametrize("way", ["prefill", "copy"])
def test_what_was_computed_ahead_for_other_keys_is_not_used(model, events, way):
    """Row 0 gets other tokens, as many as before, and the same token after them."""
    one, other = [5, 6, 7, 8], [50, 60, 70, 80]
    engine = gpu_engine(model, rows=2, room=32)
    engine.prefill(0, one)
    engine.prefill(1, other)
    _, tokens = engine.decode_likeliest([9, 9], ahead=True)
    if way == "prefill":
        engine.prefill(0, [*other, 9])
    else:
        engine.copy_row(1, 0)
    found = engine.decode_likeliest(tokens, ahead=False)[1]
    assert engine.held == [[*other, 9, tokens[0]], [*other, 9, tokens[1]]]
    alone = Engine(model, rows=1, room=32)
    alone.prefill(0, [*other, 9])
    assert found[:1] == alone.decode_likeliest(tokens[:1], ahead=False)[1]


def test_logits_that_are_not_finite_are_reported_where_they_are(model, events):
    engine = gpu_engine(model, rows=1, room=64)
    forward, num_steps = engine._static._forward, 0

    def overflowing(step):
        nonlocal num_steps
        num_steps += 1
        return forward(step) * (torch.nan if num_steps > 4 else 1)  # the first one warms up

    engine._static._forward = overflowing
    with pytest.raises(CheckpointError, match="the logits at position 24 of prompt '0' are not finite"):
        run(engine, [list(range(20))], max_new_tokens=10)


def test_a_layer_is_compiled_once_for_all_lengths(model, monkeypatch):
    monkeypatch.setattr(static_decode, "SHORTEST", 16)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, _ = run(Engine(model, rows=1, room=128), [list(range(12))], max_new_tokens=100)
    engine = Engine(model, rows=1, room=128, compile=True, backend="eager")
    assert run(engine, [list(range(12))], max_new_tokens=100)[0] == expected
    assert len(engine._static._steps) == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 + 1  # layer, head; one more for the whole room
