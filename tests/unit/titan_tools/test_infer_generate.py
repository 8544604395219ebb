"""Generation from an HF folder equals transformers' own; decoding with a cache equals the full forward."""

import pytest
import torch

from converters.weights import open_native
from tests.tiny_infer import CPU, complete, load
from tests.tiny_llama import BOS, write_llama
from titan_tools.infer.engine import Engine
from titan_tools.infer.load import load_model
from titan_tools.infer.sampling import Sampling
from trainer.models.registry import get_trainer_family

NUM_NEW = 64
CLOSE_CALL = 1e-4  # a gap between the two likeliest tokens that rounding may turn over
PROMPTS = [
    [BOS, *ids] for ids in ([7], [72, 101, 108, 108, 111], list(range(40, 90)), [(37 * i) % 256 for i in range(180)])
]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["gqa untied", "gqa tied", "one kv head", "no grouping"])
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
    num_excused = 0
    for prompt in PROMPTS:
        said = reference.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = said.sequences[0, len(prompt) :].tolist()
        tokens = generate(model, prompt).tokens
        assert len(tokens) == len(expected) == NUM_NEW
        differing = next((i for i in range(NUM_NEW) if tokens[i] != expected[i]), None)
        if differing is not None:
            best = said.logits[differing][0].topk(2).values
            assert best[0] - best[1] < CLOSE_CALL, f"token {differing} after {prompt[:5]}…"
            num_excused += 1
    print(f"{num_excused} of {len(PROMPTS)} prompts left the reference at a gap below {CLOSE_CALL}")
    assert num_excused <= 1


def test_cached_logits_equal_the_full_forward(pair):
    """Prefill, one by one, and several at once behind a filled cache give what one pass over everything gives."""
    reference, model = pair
    tokens = PROMPTS[3]
    full = reference(torch.tensor([tokens])).logits.detach()[0]
    engine = Engine(model, rows=1, room=len(tokens))
    at = 0
    for num_new in (100, 1, 1, 1, 40, 1, 1):
        logits = engine.decode([tokens[at]])[0] if num_new == 1 else engine.prefill(0, tokens[: at + num_new], keep=at)
        at += num_new
        assert (logits - full[at - 1]).abs().max() < 1e-4
    assert engine.held == [tokens[:at]]
    assert full.std() > 0.5  # the bound above means something


def test_ours_equals_our_training_model_in_one_pass(tmp_path):
    """The engine and the trainer build one model: bit-close on the same weights."""
    reference = write_llama(tmp_path)
    with open_native(tmp_path) as weights:
        whole = get_trainer_family("llama3").build_model(weights.info.args)
        model = load_model(weights.source, weights.info, dtype=torch.float32, device=CPU)
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


class Recorded:
    """A source that counts the elements read from it."""

    def __init__(self, source):
        self.source, self.tensors, self.num_read = source, source.tensors, 0

    def read(self, fqn, box):
        self.num_read += box.num_elements
        return self.source.read(fqn, box)


@pytest.mark.parametrize("tp, rank", [(1, 0), (2, 1), (4, 0), (4, 3)])
def test_a_rank_reads_only_what_it_holds(tmp_path, tp, rank):
    write_llama(tmp_path, tie_word_embeddings=True)
    with open_native(tmp_path) as weights:
        source = Recorded(weights.source)
        model = load_model(source, weights.info, dtype=torch.float32, device=CPU, tp=tp, rank=rank)
    held = {id(p): p.numel() for p in [*model.body.parameters(), model.head.weight]}  # a tied one once
    assert source.num_read == sum(held.values())
