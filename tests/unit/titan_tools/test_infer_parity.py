"""Greedy tokens are those of transformers' generate: 64 ragged prompts, alone and many at a time, past RoPE's first
context. Every token is compared, also behind one that rounding turned over, and the counts are printed.
"""

import json
import shutil

import pytest
import torch

from tests.checkpoint_forms import FORMS, write_byte_ranks
from tests.greedy_reference import assert_same, compare, greedy, ragged_prompts
from tests.tiny_families import SCALING, write_tiny
from tests.tiny_infer import complete, load
from titan_tools.infer.model.packed import PackedWeight

VOCAB = 302  # 256 bytes and what Llama 3's special tokens need
NUMBERS = {"vocab_size": VOCAB, "max_position_embeddings": 512, "num_hidden_layers": 3}
# Llama 3's own numbers but for the first context, which prompts and new tokens go past
SHORT = {"original_max_position_embeddings": 64}
MODELS = {
    "llama 3.1": ("llama3", {"rope_scaling": SCALING | SHORT}),
    "llama 3.2, tied": ("llama3_tied", {"rope_scaling": SCALING | SHORT | {"factor": 32.0}}),
    "llama 3, plain RoPE": ("llama3", {"rope_scaling": None}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3_tied", {}),
}
PROMPTS = ragged_prompts(num=64, longest=150, vocab_size=VOCAB)
NUM_NEW = 256
FEW = 32  # in the normal set
pytestmark = pytest.mark.usefixtures("one_thread")


def make(folder, called):
    """transformers' model, and ours read from its folder."""
    name, numbers = MODELS[called]
    return write_tiny(folder, name, numbers=NUMBERS | numbers), load(folder)


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """Both models, what transformers says after each prompt, and the folder."""
    folder = tmp_path_factory.mktemp("hf")
    return *make(folder, request.param), {}, folder


@pytest.fixture(scope="module")
def pair_of_llama(tmp_path_factory):
    """Both models and their folder."""
    folder = tmp_path_factory.mktemp("llama")
    return *make(folder, "llama 3.1"), folder


@pytest.fixture
def memory_full_of_nan():
    """Fresh memory holds anything; here it holds what must never be computed with."""
    torch.use_deterministic_algorithms(True)  # which fills torch.empty
    yield
    torch.use_deterministic_algorithms(False)


def expected(pair, num_new):
    reference, _, said, _ = pair
    if num_new not in said:
        said[num_new] = greedy(reference, PROMPTS, num_new)
    return said[num_new]


def say(pair, prompts, *, rows, num_new):
    return [c.tokens for c in complete(pair[1], prompts, rows=rows, max_new_tokens=num_new)]


FAST = ("llama 3.1", "qwen3")
SOME = pytest.mark.parametrize("pair", FAST, indirect=True)
SLOW = pytest.mark.slow


@SOME
@pytest.mark.parametrize("rows", [1, 8])
def test_64_prompts(pair, rows, memory_full_of_nan):
    assert_same(pair[0], PROMPTS, say(pair, PROMPTS, rows=rows, num_new=FEW), expected(pair, FEW))


WIDE = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 2051}


@pytest.mark.parametrize("called", ["llama 3.2, tied", "qwen3"])
def test_weights_large_enough_to_be_packed(called, tmp_path):
    """Those above lie as they came: a CPU's kernels gain nothing where a weight fits a core's cache."""
    name, numbers = MODELS[called]
    reference = write_tiny(tmp_path, name, numbers=NUMBERS | numbers | WIDE, std=0.05)
    model = load(tmp_path)
    assert isinstance(model.head.weight, PackedWeight)
    prompts = ragged_prompts(num=6, longest=100, vocab_size=WIDE["vocab_size"])
    said = greedy(reference, prompts, FEW)
    for rows in (1, 5):
        ours = [c.tokens for c in complete(model, prompts, rows=rows, max_new_tokens=FEW)]
        assert_same(reference, prompts, ours, said)


@SLOW
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_64_prompts_of_256_new_tokens(pair, rows):
    assert_same(pair[0], PROMPTS, say(pair, PROMPTS, rows=rows, num_new=NUM_NEW), expected(pair, NUM_NEW))


PLAIN = "llama 3, plain RoPE"  # params.json knows no other first context than 8192
EVERY_FORM = [(PLAIN, f) for f in FORMS] + [("qwen3, tied", f) for f, form in FORMS.items() if not form.llama_only]


@SLOW
@pytest.mark.parametrize(("pair", "form"), EVERY_FORM, indirect=["pair"])
def test_64_prompts_of_256_new_tokens_from_every_form(pair, form, tmp_path):
    reference, _, _, hf = pair
    write_byte_ranks(hf / "tokenizer.model")
    place = FORMS[form].write(hf, tmp_path)
    ours = load(place, model_from=None if FORMS[form].says_model else hf)
    said = [c.tokens for c in complete(ours, PROMPTS, rows=len(PROMPTS), max_new_tokens=NUM_NEW)]
    assert_same(reference, PROMPTS, said, expected(pair, NUM_NEW))


@SLOW
@pytest.mark.parametrize("form", ["hf", "dcp", "meta", "torchtune", "torchtune's own"])
def test_beyond_the_8192_tokens_that_llama_3_began_with(form, tmp_path):
    """Meta's and torchtune's formats do not say RoPE's scaling in numbers; only here it shows."""
    numbers = {"rope_scaling": SCALING, "max_position_embeddings": 131072, "num_hidden_layers": 2}
    reference = write_tiny(tmp_path / "hf", "llama3", numbers=NUMBERS | numbers)
    write_byte_ranks(tmp_path / "hf" / "tokenizer.model")
    (tmp_path / "out").mkdir()
    place = FORMS[form].write(tmp_path / "hf", tmp_path / "out")
    prompts = ragged_prompts(num=2, longest=8300, vocab_size=VOCAB)
    said = [c.tokens for c in complete(load(place), prompts, rows=2, max_new_tokens=FEW)]
    assert_same(reference, prompts, said, greedy(reference, prompts, FEW, batch=1))


@SLOW
def test_the_padded_reference_says_what_it_says_of_each_prompt_alone(pair):
    said = [g.tokens for prompt in PROMPTS[:8] for g in greedy(pair[0], [prompt], NUM_NEW)]
    assert_same(pair[0], PROMPTS[:8], said, expected(pair, NUM_NEW)[:8])


def test_the_comparison_goes_on_behind_a_close_call_and_sees_what_is_wrong(pair_of_llama):
    """That equal tokens mean something."""
    reference, model, folder = pair_of_llama
    prompts = PROMPTS[:4]
    said = greedy(reference, prompts, FEW)
    ours = [c.tokens for c in complete(model, prompts, rows=4, max_new_tokens=FEW)]
    turned = [*ours[2][:5], (ours[2][5] + 1) % VOCAB]
    turned += complete(model, [[*prompts[2], *turned]], max_new_tokens=FEW - 6)[0].tokens
    assert compare(reference, prompts, [*ours[:2], turned, ours[3]], said).wrong
    said[2].gaps[5] = 0.0
    found = compare(reference, prompts, [*ours[:2], turned, ours[3]], said)
    assert (found.wrong, found.excused, found.compared) == ([], 1, 4 * FEW)
    turned[17] = (turned[17] + 1) % VOCAB  # where the reference goes on from what we said
    assert compare(reference, prompts, [*ours[:2], turned, ours[3]], said).wrong


def test_rope_that_forgets_its_scaling_is_seen(pair_of_llama, tmp_path):
    reference, _, folder = pair_of_llama
    shutil.copytree(folder, tmp_path / "plain")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    ours = [c.tokens for c in complete(load(tmp_path / "plain"), PROMPTS[:4], rows=4, max_new_tokens=FEW)]
    assert len(compare(reference, PROMPTS[:4], ours, greedy(reference, PROMPTS[:4], FEW)).wrong) == 4
