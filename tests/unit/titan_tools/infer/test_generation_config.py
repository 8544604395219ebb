"""--generation-config: the tokens and probabilities of transformers' generate, or an error that names the fields."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from converters.common.errors import CheckpointError, ConfigError, UnsupportedError
from tests.json_lines import read_lines
from titan_tools.infer.decoding.sampling import Sampling, token_weights
from titan_tools.infer.generation_config import (
    ALWAYS_FOLLOWED,
    FOLLOWED,
    UNSUPPORTED,
    WITHOUT_EFFECT,
    GenerationConfig,
    follow,
    note_on,
)
from titan_tools.infer.request import Request

pytestmark = pytest.mark.usefixtures("one_thread")
FILE = "generation_config.json"
PROMPTS = ("def main(", "a a a a a a", "import os\nimport sys\n")


@pytest.fixture(scope="module")
def model(hf):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(hf).eval()


@pytest.fixture
def folder(hf, tmp_path):
    return shutil.copytree(hf, tmp_path / "hf")


def write(folder, **fields):
    path = folder / FILE
    own = json.loads(path.read_text())
    path.write_text(json.dumps(own | fields))


def config_of(**fields):
    return GenerationConfig(Path(FILE), {name: value for name, value in fields.items() if value is not None})


def followed(fields, **request):
    asked = Request(Path("x"), request.pop("sampling", Sampling()), generation_config=True, **request)
    return follow(config_of(**fields), asked, folder=Path("x"), vocab_size=40)


def transformers_tokens(model, prompt, **fields):
    from transformers import GenerationConfig as Theirs

    ids = torch.tensor([prompt])
    config = Theirs(**fields, eos_token_id=257, pad_token_id=0)
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :]


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3, "max_new_tokens": 12},
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_length": 30},
        {"repetition_penalty": 0.8, "max_length": 40, "max_new_tokens": 5},
        {"do_sample": True, "top_k": 1, "max_length": 33, "num_beams": 1, "use_cache": True, "typical_p": 1.0},
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_tokens_are_those_of_generate(titan, folder, model, tmp_path, fields, batch):
    write(folder, **fields)
    if batch:
        (tmp_path / "in").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
        code, out, err = titan("infer", folder, "--generation-config", "--batch", tmp_path / "in")
        results = read_lines(out)
    else:
        runs = [titan("infer", folder, "--generation-config", "--json", "--prompt", prompt) for prompt in PROMPTS]
        code, results, err = max(r[0] for r in runs), [json.loads(r[1])["results"][0] for r in runs], runs[0][2]
    assert code == 0 and "generation_config.json is followed: " in err
    for result in results:
        expected = transformers_tokens(model, result["prompt_tokens"], **fields).tolist()
        assert result["tokens"] == expected


FIELDS = [
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    {"do_sample": True, "top_k": 0, "min_p": 0.1},
    {"do_sample": True, "top_k": 100, "top_p": 1.0, "min_p": 0.0},
    {"do_sample": True, "temperature": 1.5, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_probabilities_are_those_of_generate(model, fields):
    """With transformers' own defaults for what a file leaves out: 50 for top_k."""
    from transformers import GenerationConfig as Theirs

    merged, _ = model._prepare_generation_config(Theirs(**fields))
    logits_BV = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).double() * 3
    seen_BL = torch.arange(12).reshape(6, 2)
    expected = model._get_logits_processor(merged, input_ids_seq_length=2)(seen_BL, logits_BV.clone()).softmax(-1)
    sampling = followed(fields).sampling
    penalized_BV = torch.zeros(6, 40, dtype=torch.bool).scatter(1, seen_BL, True)
    reduced_BV = torch.where(
        logits_BV < 0, logits_BV * sampling.repetition_penalty, logits_BV / sampling.repetition_penalty
    )
    weights_BV = token_weights(torch.where(penalized_BV, reduced_BV, logits_BV), sampling).double()
    torch.testing.assert_close(weights_BV / weights_BV.sum(-1, keepdim=True), expected, rtol=1e-9, atol=1e-12)


def test_flags_come_first():
    fields = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_length": 99, "repetition_penalty": 1.1}
    asked = followed(
        fields,
        sampling=Sampling(temperature=2.0, top_p=0.5, repetition_penalty=1.0, seed=7),
        explicit=("temperature", "top_p", "repetition_penalty", "max_new_tokens"),
        max_new_tokens=3,
    )
    assert asked.sampling == Sampling(2.0, 20, 0.5, None, 1.0, 7)
    assert (asked.max_new_tokens, asked.max_length) == (3, None)
    greedy = followed(fields, sampling=Sampling(0.0), explicit=("temperature",))
    assert greedy.sampling == Sampling(repetition_penalty=1.1) and greedy.max_length == 99


def test_every_field_of_transformers_is_classified():
    from transformers import GenerationConfig as Theirs

    known = FOLLOWED | ALWAYS_FOLLOWED | UNSUPPORTED.keys() | WITHOUT_EFFECT
    assert vars(Theirs()).keys() - known - {"_original_object_hash"} == set()
    defaults = Theirs._get_default_generation_params()
    for name, neutral in UNSUPPORTED.items():  # what transformers does by itself is not refused
        assert defaults.get(name) in (None, neutral), name


def test_fields_without_effect_change_no_logits(model):
    """Those called `encoder_` that count the prompt of a decoder, too, are not among them: generate hands it over."""
    from transformers import GenerationConfig as Theirs

    of_other_types = {"_from_model_config", "assistant_ensemble_weight", "cache_implementation", "compile_config"}
    of_other_types |= {"early_stopping", "continuous_batching_config"}
    prompt_BL, logits_BV = torch.tensor([[3, 4, 3, 4, 3]]), torch.linspace(-1, 1, 40)[None]
    for name in sorted(WITHOUT_EFFECT - of_other_types):
        merged, _ = model._prepare_generation_config(Theirs(**{name: 2}))
        change = model._get_logits_processor(merged, input_ids_seq_length=5, encoder_input_ids=prompt_BL)
        assert torch.equal(change(prompt_BL, logits_BV.clone()), logits_BV), name


def test_a_generation_config_next_to_model_froms_tokenizer_gives_way_to_the_checkpoints(titan, folder, tmp_path):
    write(folder, eos_token_id=257, repetition_penalty=1.0)
    other = tmp_path / "tokenizer"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(other / name)
    (other / FILE).write_text(json.dumps({"eos_token_id": list(range(256)), "repetition_penalty": 3.0}))
    asked = ("infer", folder, "--model-from", other, "--prompt", "def main(", "--max-new-tokens", "3", "--json")
    code, out, err = titan(*asked)
    assert code == 0 and "the checkpoint's own are used" in err and "repetition_penalty" not in err
    assert len(json.loads(out)["results"][0]["tokens"]) == 3
    assert "is followed: greedy decoding" in titan(*asked, "--generation-config")[2]


def test_what_cannot_be_followed_is_refused_by_name(titan, folder, untouched):
    write(folder, num_beams=4, no_repeat_ngram_size=3, suppress_tokens=[5], typical_p=0.5)
    code, out, err = titan("infer", folder, "--generation-config", "--prompt", "a")
    assert (code, out) == (2, "")
    for message in ("\n  num_beams 4", "\n  no_repeat_ngram_size 3", "\n  suppress_tokens [5]"):
        assert message in err
    assert "typical_p" not in err  # only of sampling
    with pytest.raises(UnsupportedError, match="typical_p 0.5"):
        followed({"do_sample": True, "typical_p": 0.5})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"do_sample": "yes"}, "do_sample is 'yes', not a boolean"),
        ({"do_sample": True, "top_k": "5"}, "top_k is '5', not a number"),
        ({"do_sample": True, "temperature": 0}, "do_sample with temperature 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, not a number of tokens"),
    ],
)
def test_values_that_cannot_be_are_reported_with_their_field(fields, message):
    with pytest.raises(CheckpointError, match=message):
        followed(fields)


def test_what_is_not_followed_is_said_in_one_line(titan, folder):
    asked = ("infer", folder, "--prompt", "def main(", "--max-new-tokens", "2", "--json")
    assert titan(*asked)[2] == ""
    write(folder, do_sample=True, temperature=0.6, top_p=0.9, top_k=0, max_length=4096, num_beams=1)
    err = titan(*asked)[2]
    assert err.count("\n") == 1 and err.startswith(f"{FILE}: stop tokens are followed; not followed: do_sample True")
    assert "temperature 0.6, top_p 0.9" in err and "top_k" not in err and "--generation-config" in err
    assert "temperature" not in titan(*asked, "--temperature", "0.5")[2]
    assert titan("infer", folder, "--score", "--json", "--prompt", "def main(")[2] == ""
    err = titan(*asked, "--generation-config", "--temperature", "0.5")[2]
    assert f"{FILE} is followed: " in err and "from the command line instead: temperature" in err
    shown = note_on(config_of(do_sample=True), followed({"do_sample": True}))
    assert shown.startswith(f"{FILE} is followed: do_sample True, top_k 40 (transformers' default")  # of 40 tokens
    assert note_on(config_of(chat_format="chatml"), Request(Path("x"), Sampling())) == ""


def test_prompts_that_leave_nothing_of_max_length_and_a_missing_file(titan, folder, untouched):
    write(folder, max_length=5)
    code, _, err = titan("infer", folder, "--generation-config", "--prompt", "a long prompt")
    assert code == 2 and "leave none of the max_length 5 of generation_config.json" in err
    (folder / FILE).unlink()
    code, _, err = titan("infer", folder, "--generation-config", "--prompt", "a")
    assert code == 2 and "has no generation_config.json" in err
    with pytest.raises(ConfigError):
        follow(None, Request(Path("x"), Sampling()), folder=Path("x"), vocab_size=4)
