"""Fields of config.json that are not numbers of the model come back from DCP, or are reported."""

import json
import shutil
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from converters.common.errors import CheckpointError, UnsupportedError
from converters.families.llama3 import FLAVORS, LLAMA3
from converters.model.hf_fields import _GENERATION
from converters.model.model_info import ModelInfo, read_model_info, write_hf_config, write_model_info
from tests.checkpoint_forms import write_byte_ranks
from tests.doors import convert
from tests.models.dense import write as write_tiny

INFO = ModelInfo("llama3", FLAVORS["debug_tied"])
STAMPS = {"transformers_version", "_name_or_path"}  # of who saved the file, and where


@pytest.fixture(scope="module", params=["llama3", "qwen3"])
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny(folder, request.param, numbers={"num_hidden_layers": 1})
    return folder


def changed(source, place, fields, *, generation=None):
    """A copy of the HF folder `source` with other `fields` in its config.json."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place)
    config = json.loads((place / "config.json").read_text()) | fields
    (place / "config.json").write_text(json.dumps(config))
    (place / "generation_config.json").unlink()
    if generation is not None:
        (place / "generation_config.json").write_text(json.dumps(generation, indent=3))
    return config


def round_trip(place, *, via="dcp"):
    """The remarks of both conversions, and config.json at the end."""
    remarks = convert(place, place.parent / "via", to=via, overwrite=True).remarks
    remarks += convert(place.parent / "via", place.parent / "back", to="hf", overwrite=True).remarks
    return "\n".join(remarks), json.loads((place.parent / "back" / "config.json").read_text())


def loaded(folder):
    """What transformers takes from a folder: the config, and what it generates with."""
    with redirect_stderr(StringIO()):
        model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config.to_dict()
    return {key: config[key] for key in config if key not in STAMPS}, model.generation_config.to_dict()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "attention_dropout": st.sampled_from([0.0, 0.1, 0]),
        "initializer_range": st.floats(0.001, 1),
        "use_cache": st.booleans(),
        "bos_token_id": st.none() | st.integers(0, 96),
        "eos_token_id": st.none() | st.integers(0, 96) | st.lists(st.integers(0, 96), min_size=1, max_size=3),
        "pad_token_id": st.none() | st.integers(0, 96),
        "temperature": st.floats(0.1, 2),
        "do_sample": st.booleans(),
        "unsloth_fixed": st.booleans(),
        "max_window_layers": st.integers(1, 64),
        "sliding_window": st.none(),
        "transformers_version": st.sampled_from(["4.31.0", "5.0.0"]),
    },
)
CUSTOM = st.dictionaries(st.text("abcxyz_é", min_size=1, max_size=8).map("own_{}".format), JSON, max_size=3)
GENERATION = st.none() | st.fixed_dictionaries(
    {}, optional={"eos_token_id": st.integers(0, 96), "temperature": st.floats(0.1, 2), "own": JSON}
)


def check_round_trip(source, place, fields, generation):
    config = changed(source, place, fields, generation=generation)
    remarks, back = round_trip(place)
    for key, value in config.items():
        if key not in STAMPS:
            assert (key in back and back[key] == value) or f"{key} " in remarks, (key, value, back.get(key), remarks)
    infos = [read_model_info(folder) for folder in (place, place.parent / "via", place.parent / "back")]
    assert infos[0].token_ids == infos[1].token_ids == infos[2].token_ids
    ours, theirs = (AutoConfig.from_pretrained(folder).to_dict() for folder in (place.parent / "back", place))
    for key in ours.keys() | theirs.keys():
        if key not in STAMPS:
            assert (key in ours and key in theirs and ours[key] == theirs[key]) or f"{key} " in remarks, key
    if generation is not None:
        name = "generation_config.json"
        assert (place / name).read_bytes() == (place.parent / "back" / name).read_bytes()


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(fields=FIELDS, custom=CUSTOM, generation=GENERATION)
def test_every_field_is_kept_or_reported(source, tmp_path, fields, custom, generation):
    check_round_trip(source, tmp_path / "hf", custom | fields, generation)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(fields=FIELDS, custom=CUSTOM, generation=GENERATION)
def test_every_field_is_kept_or_reported_in_many_configs(source, tmp_path, fields, custom, generation):
    check_round_trip(source, tmp_path / "hf", custom | fields, generation)


SETTINGS = {"attention_dropout": 0.1, "initializer_range": 0.01, "use_cache": False, "own": {"a": [1, None]}, "x": None}


@pytest.mark.parametrize(
    ("fields", "generation"),
    [
        (SETTINGS, None),
        (SETTINGS | {"bos_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": 3}, None),
        (SETTINGS | {"bos_token_id": None, "eos_token_id": 8}, None),
        (SETTINGS | {"bos_token_id": 7, "eos_token_id": 8}, {"eos_token_id": [8, 9], "top_p": 0.3}),  # Llama 3's first
        (SETTINGS | {"temperature": 0.5, "do_sample": True, "max_length": 77, "top_k": None}, None),  # before 4.2x
    ],
)
def test_transformers_finds_the_same_config_and_generation_settings(source, tmp_path, fields, generation):
    changed(source, tmp_path / "hf", fields, generation=generation)
    round_trip(tmp_path / "hf")
    (config, generated), (our_config, ours) = loaded(tmp_path / "hf"), loaded(tmp_path / "back")
    if "max_window_layers" in config:  # of a window that no layer has; written as the number of layers
        del config["max_window_layers"], our_config["max_window_layers"]
    assert our_config == config
    generated["_from_model_config"] = ours["_from_model_config"]  # whether there is a generation_config.json
    assert ours == generated


@pytest.mark.parametrize("via", ["dcp", "meta", "torch", "torchtune"])
def test_every_format_carries_them(tmp_path, via):
    write_tiny(tmp_path / "hf", "llama3", numbers={"vocab_size": 512})
    write_byte_ranks(tmp_path / "hf" / "tokenizer.model")
    fields = SETTINGS | {"bos_token_id": 7, "eos_token_id": 8}
    changed(tmp_path / "hf", tmp_path / "changed", fields)
    _, back = round_trip(tmp_path / "changed", via=via)
    assert back | fields == back


def test_odd_texts_and_numbers_come_back_and_are_never_printed_as_they_are(source, tmp_path):
    odd = {"own": "\ud800 ü", "\x1b[31m": 1, "\ud83d": [float("inf"), float("nan")]}
    changed(source, tmp_path / "hf", odd)
    _, back = round_trip(tmp_path / "hf")
    assert json.dumps([back[key] for key in odd]) == json.dumps([*odd.values()])
    convert(tmp_path / "via", tmp_path / "again", to="hf", model_from=tmp_path / "hf")  # NaN contradicts no NaN
    remarks = convert(tmp_path / "hf", tmp_path / "weights.pt", to="torch").remarks
    assert "\\x1b[31m" in " ".join(remarks) and all(remark.isprintable() for remark in remarks)


def test_one_file_of_weights_cannot_hold_them(source, tmp_path):
    changed(source, tmp_path / "hf", {"own": 1})
    (tmp_path / "hf" / "LICENSE").write_text("terms")
    report = convert(tmp_path / "hf", tmp_path / "weights.pt", to="torch")
    (output,) = (remark for remark in report.to_json()["remarks"] if remark.startswith("dropped"))
    assert "LICENSE" in output and "config.json's own" in output


def test_nothing_is_added_where_there_is_nothing_to_carry(tmp_path):
    write_hf_config(tmp_path, INFO, dtype="float32")
    info = read_model_info(tmp_path)
    assert info.untranslated == {} and info.remarks == () and info.generation == {}
    write_model_info(tmp_path, info)
    assert json.loads((tmp_path / "titan_model.json").read_text()).keys() == {"family", "args"}


def test_what_the_model_is_comes_from_its_numbers(tmp_path):
    """A field that a later version translates is written from the numbers, not from what was carried."""
    info = replace(INFO, untranslated={"hidden_act": "silu", "attention_dropout": 0.1, "own": 1})
    write_model_info(tmp_path, info)
    write_hf_config(tmp_path, replace(read_model_info(tmp_path), untranslated={"hidden_size": 1, "own": 2}), dtype="x")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], config["own"]) == (INFO.args.dim, 2)


@pytest.mark.parametrize(
    ("untranslated", "said"),
    [
        ([1], "a JSON list, not an object"),
        ({"model_type": "gpt2"}, "titan writes these fields itself:\n  model_type"),
        ({"rms_norm_eps": 0.5}, "change the model"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"own": "x" * (1 << 20)}, "1,048,"),
    ],
)
def test_a_damaged_titan_model_json(tmp_path, untranslated, said):
    write_model_info(tmp_path, INFO)
    content = json.loads((tmp_path / "titan_model.json").read_text()) | {"untranslated": untranslated}
    (tmp_path / "titan_model.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as raised:
        read_model_info(tmp_path)
    assert said in raised.value.message and "titan_model.json" in raised.value.message


def test_code_in_the_folder_is_dropped_with_a_remark_and_never_needed(source, tmp_path):
    names = {"AutoModelForCausalLM": "modeling_own.Own"}
    changed(source, tmp_path / "hf", {"auto_map": names})
    (tmp_path / "hf" / "modeling_own.py").write_text("raise SystemExit")
    remarks, back = round_trip(tmp_path / "hf")
    assert "auto_map" in remarks and "modeling_own.py" in remarks and "auto_map" not in back
    assert AutoConfig.from_pretrained(tmp_path / "back").model_type == back["model_type"]

    changed(source, tmp_path / "hf", {"auto_map": names, "model_type": None})  # transformers runs the code, or fails
    with pytest.raises(UnsupportedError, match="auto_map") as raised:
        convert(tmp_path / "hf", tmp_path / "out", to="dcp")
    assert "model_type" in raised.value.hint


def test_the_settings_of_generation_are_transformers_own():
    fields = GenerationConfig().to_dict().keys() - {"_from_model_config", "transformers_version"}
    assert set(_GENERATION.split()) == fields - {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert not set(_GENERATION.split()) & (LLAMA3.hf_config(INFO.args).keys() - {"use_cache"})
