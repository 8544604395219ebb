"""Ranks of tensor-parallel inference say what transformers says: greedy tokens, logits, and one rank's seeded ones.

Eight heads, so that eight ranks have one each; where there are fewer key/value heads than ranks, they are copied.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from converters.convert import convert
from tests.greedy_reference import CLOSE_CALL, MOST_EXCUSED, assert_same, greedy, ragged_prompts
from tests.tiny_families import SCALING, write_tiny
from tests.tiny_infer import NO_TEXT, complete, load
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Settings, generate
from titan_tools.infer.decoding.sampling import Sampling, Seat, choose
from titan_tools.infer.text.prompts import Prompt

VOCAB = 301  # odd: no tp cuts it evenly
NUMBERS = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
SHORT = SCALING | {"original_max_position_embeddings": 64}
MODELS = {
    "llama": ("llama3", {"rope_scaling": SHORT}),
    "llama, tied": ("llama3_tied", {"rope_scaling": SHORT, "num_key_value_heads": 4}),
    "llama, packed": (  # weights large enough to lie as a CPU's kernels read them
        "llama3",
        {"rope_scaling": SHORT, "hidden_size": 512, "intermediate_size": 1408, "num_key_value_heads": 4},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}),
    "qwen3, tied": ("qwen3_tied", {"num_key_value_heads": 1}),
}
SEEDED = Sampling(0.9, top_k=60, top_p=0.98, seed=5)
MOST_DIFFERENCE = 1e-4  # of logits
pytestmark = pytest.mark.usefixtures("one_thread")


def say(folder, tp, prompts, num_new, rows):
    """This rank's greedy and seeded tokens, and its logits along the first of the former."""
    model = load(folder, tp=tp, rank=torch.distributed.get_rank() if tp > 1 else 0)
    tokens = {
        name: [c.tokens for c in complete(model, prompts, rows=rows, max_new_tokens=num_new, sampling=sampling)]
        for name, sampling in (("greedy", Sampling()), ("seeded", SEEDED))
    }
    logits = []
    engine = Engine(model, rows=2, room=max(map(len, prompts)) + num_new)
    for prompt in prompts[:2]:
        logits += [engine.prefill(0, prompt), *(engine.decode([t])[0] for t in prompt[:6])]
    return tokens, torch.stack(logits).tolist()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model by name: its folder and transformers' own."""
    made = {}

    def write(called):
        if called not in made:
            name, numbers = MODELS[called]
            folder = tmp_path_factory.mktemp("hf")
            std = 0.05 if called == "llama, packed" else 0.2
            made[called] = folder, write_tiny(folder, name, numbers=NUMBERS | numbers, std=std)
        return made[called]

    return write


def assert_same_seeded(model, prompts, ours, expected):
    """Fail where a seeded token differs that no change of the logits by CLOSE_CALL turns over.

    Behind one that it does, one rank goes on from what the ranks said.
    """
    num_excused, noise = 0, torch.Generator().manual_seed(0)
    for number, (prompt, said, alone) in enumerate(zip(prompts, ours, expected, strict=True)):
        while said != alone:
            at = next(i for i in range(len(said)) if said[i] != alone[i])
            seat = Seat(str(number), 0, len(prompt) + at)
            logits_V = Engine(model, rows=1, room=seat.position).prefill(0, [*prompt, *said[:at]])
            moved_BV = logits_V + CLOSE_CALL * (2 * torch.rand((200, VOCAB), generator=noise) - 1)
            assert said[at] in choose(moved_BV, SEEDED, [seat] * 200), f"token {at} of prompt {number}"
            num_excused += 1
            alone = said[: at + 1]
            if len(alone) < len(said):
                rest = Prompt(str(number), "", [*prompt, *alone])
                settings = Settings(len(said) - len(alone), SEEDED)
                room = len(prompt) + len(said)
                (told,) = generate(Engine(model, rows=1, room=room), [rest], settings, NO_TEXT)
                alone = [*alone, *told.tokens]
    num = sum(map(len, ours))
    print(f"{num} seeded tokens compared, {num_excused} excused")
    assert num_excused <= MOST_EXCUSED * num


CASES = [
    pytest.param(called, tp, marks=() if (called, tp) in (("llama", 4), ("qwen3, tied", 2)) else pytest.mark.slow)
    for called in MODELS
    for tp in (2, 4, 8)
    if (called, tp) != ("llama, packed", 8)  # cut so small, they would not be
]


@pytest.mark.parametrize(("called", "tp"), CASES)
def test_ranks_say_what_transformers_says(pools, written, called, tp, request):
    folder, reference = written(called)
    is_slow = request.node.get_closest_marker("slow") is not None
    num, num_new, rows = (64, 64, 64) if is_slow else (10, 12, 8)
    prompts = ragged_prompts(num=num, longest=150, vocab_size=VOCAB)
    asked = (prompts, num_new, rows)
    (alone, logits), ranks = say(folder, 1, *asked), pools[tp].run(say, folder, tp, *asked)
    assert all(rank == ranks[0] for rank in ranks)  # bit for bit: each chooses by itself
    tokens, their_logits = ranks[0]
    assert_same(reference, prompts, tokens["greedy"], greedy(reference, prompts, num_new))
    assert_same_seeded(load(folder), prompts, tokens["seeded"], alone["seeded"])
    found, expected = torch.tensor(their_logits), torch.tensor(logits)
    assert expected.std() > 0.5
    difference = (found - expected).abs().max().item()
    print(f"tp {tp}: logits differ by {difference:.1e}")
    assert difference <= MOST_DIFFERENCE


def test_a_run_that_trained_on_two_ranks_says_what_its_export_says(whole, titan, tmp_path):
    """Its folder as it lies there: weights in shards, the optimizer beside them, the tokenizer that it trained with."""
    code, out, err = titan(
        "infer", whole, "--prompt", "word1 word2", "--max-new-tokens", "12", "--ignore-eos", "--json"
    )
    assert code == 0 and "step-4" in err, err
    (result,) = json.loads(out)["results"]
    convert(whole / "checkpoint" / "step-4", tmp_path / "hf", to="hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    prompts = [result["prompt_tokens"]]
    assert_same(model, prompts, [result["tokens"]], greedy(model, prompts, 12))
