"""Greedy tokens are those of transformers' generate: 64 ragged prompts, alone and many at a time, past RoPE's first
context, from every kind of checkpoint. Every token is compared, also behind one that rounding turned over, and the
counts are reported at the end of pytest's output.
"""

import json
import shutil

import pytest
import torch

from tests.checkpoint_forms import FORMS, write_byte_ranks, write_form
from tests.greedy_reference import assert_same, compare, greedy, ragged_prompts
from tests.models.deepseek import NUMBERS as DEEPSEEK
from tests.models.deepseek import write as write_deepseek
from tests.models.dense import SCALING
from tests.models.dense import write as write_tiny
from tests.models.gpt_oss import write as write_gpt_oss
from tests.models.llama4 import write as write_llama4
from tests.models.qwen3_moe import write as write_experts
from tests.tiny_infer import complete, load
from titan_tools.infer.model.linear import PackedWeight

VOCAB = 302  # 256 bytes and what Llama 3's special tokens need
NUMBERS = {"vocab_size": VOCAB, "max_position_embeddings": 512, "num_hidden_layers": 2}
# Llama 3's own numbers but for the first context, which prompts and new tokens go past
SHORT = SCALING | {"original_max_position_embeddings": 64}
FOUR = ("llama 3.1", "llama 3.2, tied", "qwen3", "qwen3, tied")
YARN = {  # as published
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MODELS = {
    "llama 3.1": ("llama3", {"rope_scaling": SHORT}),
    "llama 3.2, tied": ("llama3_tied", {"rope_scaling": SHORT | {"factor": 32.0}}),
    "llama 3, plain RoPE": ("llama3", {"rope_scaling": None}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3_tied", {}),
    "experts": ("experts", {"mlp_only_layers": [0]}),
    "deepseek v3": ("v3", {}),
    "deepseek v2": ("v2", {}),
    "deepseek v2, lite": ("v2_lite", {}),
    "moonlight": ("moonlight", {}),
    "kimi k2": ("kimi", {}),
    "gpt-oss": ("gpt_oss", {}),
    "llama 4, scout": ("scout", {}),
    "llama 4, maverick": ("maverick", {}),
}
LONG = {
    "llama 3.1 past 8192": ("llama3", {"rope_scaling": SCALING, "max_position_embeddings": 131072}),
    "llama 3.2, tied, past 8192": (
        "llama3_tied",
        {"rope_scaling": SCALING | {"factor": 32.0}, "max_position_embeddings": 131072},
    ),
    "deepseek v3 past 4096": ("v3", {"rope_parameters": YARN, "max_position_embeddings": 163840}),
}
PROMPTS = ragged_prompts(num=64, longest=150, vocab_size=VOCAB)
LONG_PROMPT = ragged_prompts(num=2, longest=8300, vocab_size=VOCAB)[1]
LONG_PROMPTS = [LONG_PROMPT, LONG_PROMPT[-8180:]]  # one begins past 8192, one gets there
NUM_NEW = 256
FEW = 32  # in the normal set
SLOW = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("one_thread")


class Known:
    """transformers' model, its folder, and what it says, which is asked once."""

    def __init__(self, folder, called):
        self.called, self.folder, self._said = called, folder, {}
        name, numbers = (MODELS | LONG)[called]
        if name == "experts":
            self.model = write_experts(folder, **NUMBERS | numbers)
        elif name in DEEPSEEK:
            self.model = write_deepseek(folder, name, **NUMBERS | numbers)
        elif name == "gpt_oss":
            self.model = write_gpt_oss(folder, dtype="float32", **NUMBERS | numbers)
        elif name in ("scout", "maverick"):
            self.model = write_llama4(folder, name, **NUMBERS | numbers | {"num_hidden_layers": 5})
        else:
            self.model = write_tiny(folder, name, numbers=NUMBERS | numbers)
        write_byte_ranks(folder / "tokenizer.model")  # Meta's and torchtune's code open no other
        self.prompts = LONG_PROMPTS if called in LONG else PROMPTS

    def said(self, num_new):
        if num_new not in self._said:
            # transformers counts padding as tokens of Llama 4's chunks, and in its temperature
            batch = 1 if self.called in LONG or self.called.startswith("llama 4") else len(PROMPTS)
            self._said[num_new] = greedy(self.model, self.prompts, num_new, batch=batch)
        return self._said[num_new]

    def assert_says(self, ours, *, rows, num_new, tell, form="hf"):
        """That our model says the same in `rows` sequences at once."""
        said = tokens_of(ours, self.prompts, rows=rows, num_new=num_new)
        what = f"{self.called}, {form}, rows {rows}"
        assert_same(self.model, self.prompts, said, self.said(num_new), tell=tell, what=what)


def tokens_of(model, prompts, *, rows, num_new):
    return [c.tokens for c in complete(model, prompts, rows=rows, max_new_tokens=num_new)]


@pytest.fixture(scope="module")
def asked():
    """Models that transformers was asked about."""
    return {}


@pytest.fixture
def known(request, asked, tmp_path_factory):
    """The model of that name; "llama 3.1" without one."""
    called = getattr(request, "param", "llama 3.1")
    if called not in asked:
        asked[called] = Known(tmp_path_factory.mktemp("hf"), called)
    return asked[called]


@pytest.fixture
def memory_full_of_nan():
    """Fresh memory holds anything; here it holds what must never be computed with."""
    torch.use_deterministic_algorithms(True)  # which fills torch.empty
    yield
    torch.use_deterministic_algorithms(False)


def in_forms(models, forms=tuple(FORMS)):
    """Each of `models` in those of `forms` that can hold it."""

    def can_hold(model, form):
        if (MODELS | LONG)[model][0] in DEEPSEEK:  # torchtitan has had no other names for it
            return not FORMS[form].llama_only and form not in ("torchtitan, model. prefix", "torchtitan, qkv_linear")
        if model.startswith(("gpt-oss", "llama 4")):  # checkpoint_forms.py knows no names of torchtitan for them
            return not FORMS[form].llama_only and not form.startswith("torchtitan")
        return model.startswith("llama") or not FORMS[form].llama_only

    return [(m, form) for m in models for form in forms if can_hold(m, form)]


def one_by_one():
    """Every form of a Llama and of a Qwen 3, tied and untied in turn: where batches are right, weights are."""
    pairs = [pair for n, form in enumerate(FORMS) for pair in in_forms(FOUR[n % 2 :: 2], [form])]
    return [*pairs, *((m, "hf") for m in MODELS if (m, "hf") not in pairs)]


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 8], ids=["rows 1", "rows 8"])
@pytest.mark.parametrize(
    "known",
    [
        "llama 3.1",
        "experts",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3", "deepseek v3", "gpt-oss")),
    ],
    indirect=True,
)
def test_64_prompts(known, rows, memory_full_of_nan, tell):
    known.assert_says(load(known.folder), rows=rows, num_new=FEW, tell=tell)


OF_MODELS = ("known", "form")
SOME_FORMS = ("dcp for a mesh", "torchtitan", "torch .pt", "meta, two shards", "torchtune's own")


SOME_OF_EXPERTS = ("dcp for a mesh", "torchtitan, qkv_linear")


@pytest.mark.parametrize(
    OF_MODELS,
    [
        *in_forms(["llama 3.1", "qwen3"], SOME_FORMS),
        *in_forms(["experts"], SOME_OF_EXPERTS),
        ("deepseek v3", "dcp for a mesh"),
    ],
    indirect=["known"],
)
def test_64_prompts_from_some_forms(known, form, tmp_path, tell):
    place, model_from = write_form(FORMS[form], known.folder, tmp_path)
    known.assert_says(load(place, model_from=model_from), rows=64, num_new=FEW, tell=tell, form=form)


@SLOW
@pytest.mark.parametrize(OF_MODELS, in_forms(MODELS), indirect=["known"])
def test_64_ragged_prompts_of_256_new_tokens(known, form, tmp_path, tell):
    place, model_from = write_form(FORMS[form], known.folder, tmp_path)
    known.assert_says(load(place, model_from=model_from), rows=64, num_new=NUM_NEW, tell=tell, form=form)


@SLOW
@pytest.mark.parametrize(OF_MODELS, one_by_one(), indirect=["known"])
def test_64_prompts_of_256_new_tokens_one_by_one(known, form, tmp_path, tell):
    place, model_from = write_form(FORMS[form], known.folder, tmp_path)
    known.assert_says(load(place, model_from=model_from), rows=1, num_new=NUM_NEW, tell=tell, form=form)


@SLOW
@pytest.mark.parametrize("known", MODELS, indirect=True)
def test_64_prompts_of_256_new_tokens_that_take_each_others_place(known, tell):
    known.assert_says(load(known.folder), rows=8, num_new=NUM_NEW, tell=tell)


SAY_ROPE_EACH_THEIR_OWN_WAY = [
    *("hf", "dcp", "dcp for a mesh", "torch folder", "torch .pt"),
    *(name for name, form in FORMS.items() if form.llama_only),
]


@SLOW
@pytest.mark.parametrize(OF_MODELS, in_forms(LONG, SAY_ROPE_EACH_THEIR_OWN_WAY), indirect=["known"])
def test_beyond_the_tokens_that_a_model_began_with(known, form, tmp_path, tell):
    """Here Meta's and torchtune's formats say all numbers themselves, and only here does that show."""
    place, model_from = write_form(FORMS[form], known.folder, tmp_path)
    known.assert_says(load(place, model_from=model_from), rows=2, num_new=FEW, tell=tell, form=form)


@SLOW
@pytest.mark.parametrize("known", MODELS, indirect=True)
def test_the_padded_reference_says_what_it_says_of_each_prompt_alone(known):
    said = [g.tokens for prompt in PROMPTS[:8] for g in greedy(known.model, [prompt], NUM_NEW)]
    assert_same(known.model, PROMPTS[:8], said, known.said(NUM_NEW)[:8])


WIDE = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 2051}


@pytest.mark.parametrize("called", ["llama 3.2, tied", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_weights_large_enough_to_be_packed(called, tmp_path, tell):
    """Those above lie as they came: a CPU's kernels gain nothing where a weight fits a core's cache."""
    name, numbers = MODELS[called]
    reference = write_tiny(tmp_path, name, numbers=NUMBERS | numbers | WIDE, std=0.05)
    model = load(tmp_path)
    assert isinstance(model.head.weight, PackedWeight)
    prompts = ragged_prompts(num=6, longest=100, vocab_size=WIDE["vocab_size"])
    said = greedy(reference, prompts, FEW)
    for rows in (1, 5):
        ours = tokens_of(model, prompts, rows=rows, num_new=FEW)
        assert_same(reference, prompts, ours, said, tell=tell, what=f"{called}, packed, rows {rows}")


def test_the_comparison_goes_on_behind_a_close_call_and_sees_what_is_wrong(known):
    """That equal tokens mean something."""
    reference, model, prompts = known.model, load(known.folder), PROMPTS[:4]
    said = greedy(reference, prompts, FEW)
    ours = tokens_of(model, prompts, rows=4, num_new=FEW)
    turned = [*ours[2][:5], said[2].seconds[5]]
    turned += tokens_of(model, [[*prompts[2], *turned]], rows=1, num_new=FEW - 6)[0]
    with_turned = [*ours[:2], turned, ours[3]]
    assert compare(reference, prompts, with_turned, said).wrong
    said[2].gaps[5] = 0.0
    found = compare(reference, prompts, with_turned, said)
    assert (found.wrong, found.excused, found.compared) == ([], 1, 4 * FEW)
    assert turned[6:] != ours[2][6:]
    said[2].seconds[5] += 1  # another one than the second is no close call
    assert compare(reference, prompts, with_turned, said).wrong
    said[2].seconds[5] -= 1
    turned[17] = (turned[17] + 1) % VOCAB  # where the reference goes on from what we said
    assert compare(reference, prompts, with_turned, said).wrong


def test_rope_that_forgets_its_scaling_is_seen(known, tmp_path):
    shutil.copytree(known.folder, tmp_path / "plain")
    config = json.loads((known.folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    ours = tokens_of(load(tmp_path / "plain"), PROMPTS[:4], rows=4, num_new=FEW)
    assert len(compare(known.model, PROMPTS[:4], ours, greedy(known.model, PROMPTS[:4], FEW)).wrong) == 4
