"""What others got wrong about these families (RoPE, norms, heads, tokens): `titan infer` against transformers."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoint_forms import FORMS
from tests.doors import convert
from tests.greedy_reference import assert_same, greedy, ragged_prompts
from tests.models.dense import SCALING
from tests.models.dense import write as write_tiny
from tests.models.llama import BOS, EOS, write_tokenizer
from tests.tiny_infer import complete, load
from titan_tools.infer.decoding.engine import Engine

PROMPT = "def main("
VOCAB = 301
PROMPTS = ragged_prompts(num=6, longest=60, vocab_size=VOCAB)
NUMBERS = {"vocab_size": VOCAB, "max_position_embeddings": 256, "bos_token_id": BOS, "eos_token_id": EOS}
NUM_NEW = 24
pytestmark = pytest.mark.usefixtures("one_thread")


def logits_of(model, tokens):
    return Engine(model, rows=1, room=len(tokens)).prefill(0, tokens)


BIASES = {"attention_bias": True, "mlp_bias": True}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# What each takes from the config alone: no weight's shape tells it
ODD = {
    "llama 2": ("llama2", {}, ("dcp", "torch folder", "meta")),  # 11 layers, "10" before "2" in a sorted list
    "llama 2, code": ("llama2_theta", {"vocab_size": VOCAB, "num_hidden_layers": 2}, ("dcp", "torchtitan", "meta")),
    "a large eps": ("llama3", {"rms_norm_eps": 0.3, "rope_scaling": None}, ("dcp", "torch .pt", "meta")),
    "qwen3, a large eps": ("qwen3", {"rms_norm_eps": 0.3}, ("dcp", "torch folder")),
    "llama, heads wider than the model": ("llama3", {"head_dim": 20, "rope_scaling": None}, ("dcp", "torchtitan")),
    "llama, one kv head": ("llama3_tied", {"num_key_value_heads": 1}, ("dcp", "meta")),
    "qwen3, no grouping": ("qwen3_tied", {"num_key_value_heads": 4}, ("dcp",)),
    "llama, biases, linear RoPE": ("llama3", BIASES | {"rope_scaling": LINEAR}, ("dcp", "torch folder", "torchtitan")),
    "qwen3, biases, YaRN": ("qwen3", {"attention_bias": True, "rope_scaling": YARN}, ("dcp", "torch .pt")),
    "llama, dynamic RoPE": ("llama3_tied", {"rope_scaling": LINEAR | {"rope_type": "dynamic"}}, ("dcp",)),
    "theta": ("llama3", {"rope_theta": 777.0, "rope_scaling": None}, ("dcp", "meta")),
}


QUICK = {"llama 2", "llama, heads wider than the model", "llama, biases, linear RoPE", "qwen3, biases, YaRN"}


@pytest.mark.parametrize(
    "called", [pytest.param(called, marks=[pytest.mark.slow] * (called not in QUICK)) for called in ODD]
)
def test_numbers_that_no_shape_tells(called, tmp_path):
    name, numbers, forms = ODD[called]
    model = write_tiny(tmp_path / "hf", name, numbers=NUMBERS | numbers)
    expected = greedy(model, PROMPTS, NUM_NEW)
    for form in ("hf", *forms):
        (tmp_path / f"as {form}").mkdir()
        place = FORMS[form].write(tmp_path / "hf", tmp_path / f"as {form}")
        ours = load(place, model_from=None if FORMS[form].says_model else tmp_path / "hf")
        said = [c.tokens for c in complete(ours, PROMPTS, rows=3, max_new_tokens=NUM_NEW)]
        assert_same(model, PROMPTS, said, expected)


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_another_eps_is_another_model(tmp_path, eps):
    """That the large eps above is seen at all."""
    write_tiny(tmp_path / "hf", "llama3", numbers=NUMBERS | {"rms_norm_eps": 0.3})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    before = logits_of(load(tmp_path / "hf"), PROMPTS[1])
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": eps}))
    moved = (logits_of(load(tmp_path / "hf"), PROMPTS[1]) - before).abs().max()
    assert (moved > 0.1) == (eps != 0.3)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_a_config_of_transformers_4(tmp_path, name):
    """rope_theta, rope_scaling and torch_dtype, where transformers 5 writes rope_parameters and dtype."""
    scaling = {"rope_scaling": SCALING | {"original_max_position_embeddings": 64}} if name == "llama3" else {}
    model = write_tiny(tmp_path, name, numbers=NUMBERS | scaling)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    config["rope_scaling"] = rope if name == "llama3" else None
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = ragged_prompts(num=4, longest=200, vocab_size=VOCAB)
    said = [c.tokens for c in complete(load(tmp_path), prompts, rows=4, max_new_tokens=NUM_NEW)]
    assert_same(model, prompts, said, greedy(model, prompts, NUM_NEW))


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_bfloat16_keeps_rope_in_float32_far_out(tmp_path, name):
    """Frequencies that were rounded to bf16 are off by whole turns there."""
    numbers = NUMBERS | {"max_position_embeddings": 4096, "num_hidden_layers": 2}
    cast = write_tiny(tmp_path, name, dtype=torch.bfloat16, numbers=numbers)  # by .to(), RoPE's frequencies too
    tokens = ragged_prompts(num=2, longest=3000, vocab_size=VOCAB)[1]
    ours = logits_of(load(tmp_path, dtype=torch.bfloat16), tokens)
    loaded = (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=d) for d in (torch.bfloat16, torch.float32))
    with torch.no_grad():
        theirs, exact, wrong = (
            model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].float() for model in (*loaded, cast)
        )
    bound = 3 * (theirs - exact).abs().max()
    assert (ours - exact).abs().max() < bound
    if name == "qwen3":  # whose norms make attention sharp, so that it shows
        assert (wrong - exact).abs().max() > bound


TOKENIZERS = {  # tokenizer_config.json, whether the tokenizer puts BOS before a text, and generation_config.json
    "llama": ({"bos_token": "<|begin_of_text|>"}, True, {"bos_token_id": BOS, "eos_token_id": EOS}),
    "ends alone in a generation config": ({"bos_token": "<|begin_of_text|>"}, True, {"eos_token_id": EOS}),
    "qwen": ({"bos_token": None, "add_bos_token": False}, False, {"bos_token_id": BOS, "eos_token_id": EOS}),
    "smollm": ({"bos_token": "<|begin_of_text|>"}, False, None),
    "none named": ({"bos_token": None}, False, None),
}


@pytest.mark.parametrize("called", TOKENIZERS)
def test_a_prompt_begins_as_the_tokenizer_says(titan, tmp_path, called):
    """Not as what is named: Qwen 3's generation config and SmolLM2's tokenizer name a BOS that stands before no text.

    --from-bos begins with it, as `generate` does without a prompt.
    """
    config, has_bos, generation = TOKENIZERS[called]
    hf = tmp_path / "hf"
    write_tiny(hf, "qwen3", numbers=NUMBERS | {"num_hidden_layers": 2})
    write_tokenizer(hf)
    output = config | {"eos_token": "<|end_of_text|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (hf / "tokenizer_config.json").write_text(json.dumps(output))
    if not has_bos:
        described = json.loads((hf / "tokenizer.json").read_text())
        (hf / "tokenizer.json").write_text(json.dumps(described | {"post_processor": None}))
    if generation is None:
        (hf / "generation_config.json").unlink()
    else:
        (hf / "generation_config.json").write_text(json.dumps(generation))
    convert(hf, tmp_path / "dcp", to="dcp")
    theirs = AutoTokenizer.from_pretrained(hf)(PROMPT).input_ids
    assert (theirs[0] == BOS) == has_bos
    for place in (hf, tmp_path / "dcp"):
        for prompt, expected in ((("--prompt", PROMPT), theirs), (("--prompt", "", "--from-bos"), [BOS])):
            code, out, err = titan("infer", place, *prompt, "--max-new-tokens", "1", "--json")
            assert code == 0, err
            assert json.loads(out)["results"][0]["prompt_tokens"] == expected


@pytest.mark.parametrize("has_bos", [True, False])
def test_a_text_is_scored_behind_what_a_prompt_begins_with(titan, tmp_path, has_bos):
    write_tiny(tmp_path, "llama3", numbers=NUMBERS | {"num_hidden_layers": 2})
    write_tokenizer(tmp_path)
    if not has_bos:
        described = json.loads((tmp_path / "tokenizer.json").read_text())
        (tmp_path / "tokenizer.json").write_text(json.dumps(described | {"post_processor": None}))
    code, out, err = titan("infer", tmp_path, "--prompt", PROMPT, "--score", "--json")
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    theirs = AutoTokenizer.from_pretrained(tmp_path)(PROMPT).input_ids
    assert (result["prompt_tokens"], result["num_tokens"]) == (theirs, len(theirs) - 1)


def test_any_of_several_ends_ends_as_in_transformers(titan, tmp_path):
    """A list in the generation config comes before the single id of config.json (Llama 3's Instruct, Qwen 3)."""
    model = write_tiny(tmp_path / "hf", "qwen3", numbers=NUMBERS | {"num_hidden_layers": 2})
    write_tokenizer(tmp_path / "hf")
    prompt = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json")).encode(PROMPT).ids
    (free,) = greedy(model, [prompt], NUM_NEW)
    ends = [EOS, free.tokens[9], free.tokens[7]]
    path = tmp_path / "hf" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=ends)
    expected = output[0, len(prompt) :].tolist()
    assert len(expected) < NUM_NEW
    for place in (tmp_path / "hf", tmp_path / "dcp"):
        _, out, _ = titan("infer", place, "--prompt", PROMPT, "--max-new-tokens", NUM_NEW, "--json")
        (result,) = json.loads(out)["results"]
        assert (result["tokens"], result["finish_reason"]) == (expected, "stop")
