"""Generation from an HF folder equals transformers' own; no sequence knows what runs next to it."""

import pytest
import torch

from converters.source.weights import open_native
from tests.greedy_reference import assert_same, greedy
from tests.models.llama import BOS
from tests.models.llama import write as write_llama
from tests.tiny_infer import CPU, NO_TEXT, complete, load
from tests.watched_engine import Watched, ragged, run
from titan_tools.infer.decoding import generate as generate_file
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import GenerationSettings, Timings
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.model.load import load_model
from titan_tools.infer.text.prompts import Prompt
from trainer.models.registry import get_trainer_family

NUM_NEW = 64
PROMPTS = [
    [BOS, *ids] for ids in ([7], [72, 101, 108, 108, 111], list(range(40, 90)), [(37 * i) % 256 for i in range(180)])
]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(
    scope="module",
    params=[
        "gqa tied",
        "one kv head",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("gqa untied", "no grouping")),
    ],
)
def pair(request, tmp_path_factory):
    """A transformers model and ours, read from the folder that it was saved to."""
    numbers = {
        "gqa untied": {},
        "gqa tied": {"tie_word_embeddings": True},
        "one kv head": {"num_key_value_heads": 1, "head_dim": 16},
        "no grouping": {"num_key_value_heads": 4, "rope_scaling": None},
    }[request.param]
    folder = tmp_path_factory.mktemp("hf")
    reference = write_llama(folder, **numbers)
    return reference, load(folder)


def generate(model, tokens, *, num_new=NUM_NEW, **settings):
    return complete(model, [tokens], max_new_tokens=num_new, **settings)[0]


def test_greedy_tokens_equal_transformers(pair):
    reference, model = pair
    ours = [generate(model, prompt).tokens for prompt in PROMPTS]
    assert_same(reference, PROMPTS, ours, greedy(reference, PROMPTS, NUM_NEW))


def test_ours_equals_our_training_model_in_one_pass(tmp_path):
    """The engine and the trainer build one model: bit-close on the same weights."""
    reference = write_llama(tmp_path)
    with open_native(tmp_path) as weights:
        whole = get_trainer_family("llama3").build_model(weights.info.args)
        model = load_model(weights.source, weights.info, dtype=torch.float32, device=CPU, fused=False)
    whole.load_state_dict({**model.body.state_dict(), "output.weight": model.head.weight})
    tokens = torch.tensor([PROMPTS[2]])
    ours = Engine(model, rows=1, room=64).prefill(0, PROMPTS[2])
    with torch.inference_mode():
        expected = whole(tokens)[0, -1]
    assert (ours - expected).abs().max() < 1e-5
    assert (ours - reference(tokens).logits[0, -1]).abs().max() < 1e-4


def test_a_stop_token_ends_and_is_kept(pair):
    _, model = pair
    free = generate(model, PROMPTS[1]).tokens
    stop = free[9]
    ended = generate(model, PROMPTS[1], stop_ids=frozenset({stop, 12345}))
    assert ended.tokens == free[: free.index(stop) + 1]
    assert ended.finish_reason == "stop"
    assert generate(model, PROMPTS[1], num_new=3).finish_reason == "length"


def test_one_new_token(pair):
    _, model = pair
    assert len(generate(model, PROMPTS[0], num_new=1).tokens) == 1


def test_sampled_tokens_depend_on_the_seed_alone(pair):
    _, model = pair
    drawn = [generate(model, PROMPTS[1], sampling=Sampling(1.0, seed=seed)).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_bfloat16_reads_and_computes_in_bfloat16(tmp_path):
    reference = write_llama(tmp_path).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.body.parameters()} == {torch.bfloat16}
    tokens = torch.tensor([PROMPTS[2]])
    ours = Engine(model, rows=1, room=64).prefill(0, PROMPTS[2])
    exact = reference.float()(tokens).logits[0, -1]  # the same bf16 weights, computed in fp32
    theirs = reference.to(torch.bfloat16)(tokens).logits[0, -1].float()
    assert (ours - exact).abs().max() < 3 * (theirs - exact).abs().max()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A transformers model and ours, for what does not depend on its shape."""
    folder = tmp_path_factory.mktemp("llama")
    return write_llama(folder), load(folder)


SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(1.0, top_k=40, top_p=0.9, seed=3),
    "penalised": Sampling(repetition_penalty=1.3),
    "seeded and penalised": Sampling(1.5, repetition_penalty=1.2, seed=5),
}


QUICK = {("seeded and penalised", False), ("seeded", True)}


@pytest.mark.parametrize(
    ("sampling", "static"),
    [
        pytest.param(sampling, static, marks=[pytest.mark.slow] * ((name, static) not in QUICK), id=f"{name}-{static}")
        for name, sampling in SAMPLINGS.items()
        for static in (False, True)
    ],
)
def test_a_sequence_is_the_same_alone_and_among_others(llama, sampling, static):
    """More prompts than rows, of all lengths, that end at different times, so that rows are taken up and moved."""
    prompts, stop_ids = ragged(20, 40), frozenset(range(0, 301, 23))
    settings = {"sampling": sampling, "stop_ids": stop_ids, "samples": 2, "max_new_tokens": 24}
    alone, _ = run(Engine(llama[1], rows=1, room=64, static=False), prompts, **settings)
    engine = Watched(llama[1], rows=5, room=64, static=static)
    among, order = run(engine, prompts, **settings)
    assert among == alone
    assert len(among) == 40
    assert order != sorted(order)
    assert {reason for _, reason in among.values()} == {"stop", "length"}
    assert engine.nums[0] == 5 > engine.nums[-1]
    assert any(length is None for _, _, length in engine.copies)  # a row at the end moved
    assert max(map(len, engine.passes)) > 1


def test_a_beginning_that_is_copied_is_the_same_as_one_that_is_read(llama):
    """Prompts that part at every place from where copies begin to pay, the first of two alike and one within others."""
    whole = [(19 * i + 4) % 256 for i in range(60)]
    prompts = [[*whole[:n], 200 - n, *range(n % 3)] for n in range(28, 48)] + [whole, whole, whole[:40]]
    alone = [run(Engine(llama[1], rows=1, room=80), [one], max_new_tokens=8)[0] for one in prompts]
    engine = Watched(llama[1], rows=6, room=80)
    among, _ = run(engine, prompts, max_new_tokens=8)
    assert [among[i, 0] for i in range(len(prompts))] == [output[0, 0] for output in alone]
    assert sum((length or 0) >= 32 for source, target, length in engine.copies if source != target) > 5


def test_the_prompt_of_several_samples_is_prefilled_once(llama):
    prompts, sampling = ragged(6, 30, seed=1), Sampling(1.0, seed=2)
    settings = {"sampling": sampling, "max_new_tokens": 16, "stop_ids": frozenset(range(0, 301, 17))}
    for rows in (1, 2, 4, 32):
        engine, timings = Watched(llama[1], rows=rows, room=48), Timings()
        said, _ = run(engine, prompts, samples=5, timings=timings, **settings)
        assert [length for _, length, _ in engine.prefills] == [len(p) for p in prompts]
        assert len(timings.first_token_secs) == len(prompts)
        assert timings.num_tokens == sum(len(tokens) for tokens, _ in said.values())
        assert sum(engine.nums) == timings.num_tokens - 30
        for sample in range(5):
            for n, prompt in enumerate(prompts):
                if rows == 4:
                    assert said[n, sample][0] == separately(llama[1], prompt, n, sample, settings)
        assert len({tuple(tokens) for tokens, _ in said.values()}) > 20


def separately(model, prompt, n, sample, settings):
    """One sample of one prompt, token by token, each from a prefill of its own."""
    from titan_tools.infer.decoding.sampling import NoiseKey, choose

    tokens = list(prompt)
    while len(tokens) < len(prompt) + settings["max_new_tokens"]:
        logits = Engine(model, rows=1, room=64).prefill(0, tokens)[None]
        tokens += choose(logits, settings["sampling"], [NoiseKey(str(n), sample, len(tokens))])
        if tokens[-1] in settings["stop_ids"]:
            break
    return tokens[len(prompt) :]


def test_samples_that_end_together_leave_their_prompt_to_the_next(llama):
    """The row that holds it is free then, among others that new prompts take."""
    prompts = ragged(12, 12, seed=2)
    settings = {"sampling": Sampling(1.5, seed=1), "samples": 3, "max_new_tokens": 3, "stop_ids": range(0, 301, 3)}
    alone, _ = run(Engine(llama[1], rows=1, room=16), prompts, **settings)
    for rows in (2, 3, 4, 5):
        assert run(Engine(llama[1], rows=rows, room=16), prompts, **settings)[0] == alone


def test_the_time_of_a_run_is_distinguished(llama, monkeypatch):
    """To a first token, in decode steps, and in what prepares them: by a clock that only the engine moves on."""
    now = 0

    class Clocked(Engine):
        def _goes_by(self, secs):
            nonlocal now
            now += secs

        def prefill_rows(self, prompts):
            self._goes_by(1000 * len(prompts))
            return super().prefill_rows(prompts)

        def prepare_decode(self, num):
            self._goes_by(100)
            super().prepare_decode(num)

        def decode(self, tokens):
            self._goes_by(len(tokens))
            return super().decode(tokens)

    monkeypatch.setattr(generate_file, "perf_counter", lambda: now)
    timings, prompts = Timings(), ragged(3, 9)
    run(Clocked(llama[1], rows=2, room=32), prompts, timings=timings, max_new_tokens=5)
    assert timings.first_token_secs == [2000, 2000, 1000]  # two had theirs from one pass
    assert (timings.num_decode_steps, timings.num_tokens) == (8, 3 + 12)
    assert (timings.prepare_secs, timings.decode_secs) == (800, 12)


def test_the_repetition_penalty_is_transformers(llama):
    """Of prompt and new tokens alike, in every row by itself."""
    reference, model = llama
    prompts = ragged(6, 60, seed=4)
    said, _ = run(Engine(model, rows=4, room=96), prompts, sampling=Sampling(repetition_penalty=1.5), max_new_tokens=32)
    for n, prompt in enumerate(prompts):
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=32, eos_token_id=None, repetition_penalty=1.5
        )
        assert said[n, 0][0] == expected[0, len(prompt) :].tolist()


def test_a_sequence_that_ends_at_its_first_token_leaves_the_row_to_the_next(llama):
    prompts = ragged(5, 20, seed=6)
    first = [tokens[0] for tokens, _ in run(Engine(llama[1], rows=1, room=64), prompts, max_new_tokens=1)[0].values()]
    free, _ = run(Engine(llama[1], rows=1, room=64), prompts, max_new_tokens=8)
    stop_ids = frozenset({first[0], first[1], first[3]})
    said, order = run(Engine(llama[1], rows=2, room=64), prompts, max_new_tokens=8, stop_ids=stop_ids, samples=2)
    for (n, _), (tokens, _) in said.items():
        whole = free[n, 0][0]
        end = next((i for i, token in enumerate(whole) if token in stop_ids), 7)
        assert tokens == whole[: end + 1]
    assert len(order) == 10
    assert order[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_what_ends_is_reported_at_once_and_prompts_are_asked_for_when_there_is_room(llama):
    asked = []

    def prompts():
        for n, tokens in enumerate(ragged(6, 20, seed=7)):
            asked.append(n)
            yield Prompt(str(n), "", tokens)

    engine = Engine(llama[1], rows=2, room=64)
    output = generate_file.generate(engine, prompts(), GenerationSettings(max_new_tokens=4), NO_TEXT)
    assert next(output).prompt.id == "0"
    assert asked == [0, 1]
    assert len(list(output)) == 5


@pytest.mark.parametrize("static", [False, True])
def test_a_conversation_goes_on_behind_what_the_row_holds(llama, static):
    """`held` are the tokens whose keys are there: all but the last that was said."""
    turns = [ragged(1, 60, seed=8)[0] + list(range(30)), *ragged(2, 30, seed=9)]
    engine, history, tokens, said = Watched(llama[1], rows=1, room=240, static=static), [], [], []
    for turn in turns:
        history = history + tokens + turn
        keep = len(engine.held[0])
        assert engine.held[0] == history[:keep]
        (tokens, _), *_ = run(engine, [history], max_new_tokens=12)[0].values()
        assert engine.prefills[-1] == (0, len(history), keep)
        assert engine.held[0] == [*history, *tokens][:-1]
        said.append((history, tokens))
    assert engine.prefills[-1][2] > 30
    assert [c.tokens for c in complete(llama[1], [h for h, _ in said], max_new_tokens=12)] == [t for _, t in said]
