"""converters/source/model_from.py: --model-from adds what a checkpoint does not say, and contradicts nothing."""

import json
import shutil

import pytest

from converters.common.errors import CheckpointError, ConfigError, UnsupportedError
from converters.diff import diff
from converters.inspect import inspect_checkpoint
from converters.model.model_info import read_model_info
from converters.source.weights import open_native
from converters.verify import verify
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama
from tests.models.llama import write_meta

TWO = {"rms_norm_eps": 0.5, "attention_dropout": 0.1}


def write_config(folder, fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def forget_fields(folder):
    """As titan wrote it before it carried them."""
    content = json.loads((folder / "titan_model.json").read_text())
    del content["untranslated"]
    (folder / "titan_model.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def folders(hf, tmp_path_factory):
    """The same weights as HF and DCP, and an HF folder `other` that says something else of them."""
    root = tmp_path_factory.mktemp("folders")
    shutil.copytree(hf, root / "hf")
    convert(hf, root / "dcp", to="dcp")
    shutil.copytree(hf, root / "other")
    write_config(root / "other", TWO)
    return root


@pytest.fixture
def bare(folders, tmp_path):
    """Weights alone, without a word on what they are."""
    (tmp_path / "bare").mkdir()
    shutil.copy(folders / "hf" / "model.safetensors", tmp_path / "bare")
    return tmp_path / "bare"


USES = {
    "convert": lambda source, given, out: convert(source, out, to="torch", model_from=given),
    "inspect": lambda source, given, out: inspect_checkpoint(source, model_from=given),
    "diff": lambda source, given, out: diff(source, source, model_from=given),
    "verify": lambda source, given, out: verify(source, model_from=given),
    "open": lambda source, given, out: open_native(source, model_from=given).__exit__(None),
    "reshard": lambda source, given, out: reshard(source, out, num_files=1, model_from=given),
}


@pytest.mark.parametrize(
    ("source", "use"), [(source, use) for source in ("hf", "dcp") for use in USES if (source, use) != ("hf", "reshard")]
)
def test_a_contradiction_is_an_error_with_both_values(folders, tmp_path, source, use):
    with pytest.raises(ConfigError) as raised:
        USES[use](folders / source, folders / "other", tmp_path / "out")
    assert "norm_eps: 1e-06 in the checkpoint, 0.5 in --model-from" in raised.value.message
    assert "attention_dropout: 0.0 in the checkpoint, 0.1 in --model-from" in raised.value.message
    assert str(folders / "other") in raised.value.message and str(folders / source) in raised.value.hint
    assert not (tmp_path / "out").exists()
    USES[use](folders / source, folders / "hf", tmp_path / "out")  # which says the same


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_parameters": None, "rope_theta": 20000.0}, "rope_theta: 10000.0 in"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "rope_scaling: {'factor': 8.0"),
        ({"eos_token_id": [257, 258]}, "eos_token_id: 257 in the checkpoint, [257, 258] in --model-from"),
        ({"tie_word_embeddings": True}, "tied: False in the checkpoint, True in --model-from"),
    ],
)
def test_numbers_and_token_ids_are_compared(folders, tmp_path, fields, said):
    other = shutil.copytree(folders / "hf", tmp_path / "other")
    write_config(other, fields)
    (other / "generation_config.json").unlink()
    with pytest.raises(ConfigError) as raised:
        convert(folders / "dcp", tmp_path / "out", to="hf", model_from=other)
    assert said in raised.value.message


def test_the_way_out_that_the_hint_names(titan, folders, bare, tmp_path):
    wrong = shutil.copytree(folders / "other", tmp_path / "wrong")
    code, _, err = titan("convert", "auto", wrong, tmp_path / "out", "--to", "hf", "--model-from", folders / "hf")
    assert code == 2 and f"correct or remove {wrong / 'config.json'}" in err
    (wrong / "config.json").unlink()
    code, _, err = titan("convert", "auto", wrong, tmp_path / "out", "--to", "hf", "--model-from", folders / "hf")
    assert code == 0 and read_model_info(tmp_path / "out").args == read_model_info(folders / "hf").args, err


def test_a_source_that_is_refused_stays_refused(folders, tmp_path):
    wrong = shutil.copytree(folders / "hf", tmp_path / "wrong")
    write_config(wrong, {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    with pytest.raises(UnsupportedError, match="Mamba") as raised:
        convert(wrong, tmp_path / "out", to="dcp", model_from=folders / "hf")
    assert f"correct or remove {wrong / 'config.json'}" in raised.value.hint


def test_infer_refuses_and_adds_alike(titan, folders, tmp_path):
    ask = ("--prompt", "def", "--max-new-tokens", "2")
    code, out, err = titan("infer", folders / "dcp", *ask, "--model-from", folders / "other")
    assert (code, out) == (2, "") and "norm_eps: 1e-06 in the checkpoint, 0.5 in --model-from" in err
    expected = titan("infer", folders / "hf", *ask)
    assert titan("infer", folders / "dcp", *ask, "--model-from", folders / "hf")[:2] == expected[:2]


# What is added


def test_a_folder_with_a_tokenizer_alone_adds_it(folders, tmp_path):
    source = shutil.copytree(folders / "hf", tmp_path / "source", ignore=shutil.ignore_patterns("*token*"))
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folders / "hf" / name, tmp_path / "tokenizer")
    report = convert(source, tmp_path / "out", to="dcp", model_from=tmp_path / "tokenizer")
    assert {"assets/tokenizer.json", "assets/tokenizer_config.json"} <= set(report.other_files)
    assert report.remarks == ()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither a tokenizer nor"):
        convert(source, tmp_path / "other", to="dcp", model_from=tmp_path / "empty")


def test_reshard_writes_what_is_added(folders, tmp_path):
    source = shutil.copytree(folders / "dcp", tmp_path / "source")
    for name in ("assets/tokenizer.json", "titan_manifest.json"):
        (source / name).unlink()
    forget_fields(source)
    given = shutil.copytree(folders / "hf", tmp_path / "given")
    write_config(given, {"attention_dropout": 0.25})
    reshard(source, tmp_path / "out", num_files=1, model_from=given)
    assert (tmp_path / "out" / "assets" / "tokenizer.json").is_file()
    assert read_model_info(tmp_path / "out").untranslated["attention_dropout"] == 0.25


def test_another_tokenizer_is_an_error_and_another_spelling_of_it_is_not(folders, tmp_path):
    given = shutil.copytree(folders / "hf", tmp_path / "given")
    tokenizer = json.loads((given / "tokenizer.json").read_text())
    (given / "tokenizer.json").write_text(json.dumps(tokenizer))  # indented otherwise
    assert convert(folders / "dcp", tmp_path / "out", to="hf", model_from=given).remarks == ()
    tokenizer["model"]["vocab"]["a"], tokenizer["model"]["vocab"]["b"] = 1, 2
    (given / "tokenizer.json").write_text(json.dumps(tokenizer))
    for source in (folders / "dcp", folders / "hf"):
        with pytest.raises(ConfigError, match="tokenizer.json: .* and .* are different tokenizers"):
            convert(source, tmp_path / "other", to="torch", model_from=given)


def test_a_tokenizer_of_another_kind_is_not_taken(titan, folders, tmp_path):
    given = shutil.copytree(folders / "hf", tmp_path / "given")
    (given / "tokenizer.json").rename(given / "tokenizer.model")
    report = convert(folders / "dcp", tmp_path / "out", to="torch", model_from=given)
    assert "assets/tokenizer.model" not in report.other_files
    assert any("the checkpoint's own (tokenizer.json)" in remark for remark in report.remarks)
    code, _, err = titan("infer", folders / "dcp", "--prompt", "a", "--max-new-tokens", "1", "--model-from", given)
    assert code == 0 and "the checkpoint's own (tokenizer.json)" in err


def test_other_contents_of_other_files_are_named(folders, tmp_path):
    given = shutil.copytree(folders / "hf", tmp_path / "given")
    config = json.loads((given / "generation_config.json").read_text())
    (given / "generation_config.json").write_text(json.dumps(config | {"transformers_version": "4"}))
    assert convert(folders / "dcp", tmp_path / "out", to="hf", model_from=given).remarks == ()
    (given / "generation_config.json").write_text(json.dumps(config | {"temperature": 0.3}))
    report = convert(folders / "dcp", tmp_path / "other", to="hf", model_from=given)
    assert any("generation_config.json; the checkpoint's own" in remark for remark in report.remarks)
    assert "temperature" not in (tmp_path / "other" / "generation_config.json").read_text()


def test_an_older_titan_s_checkpoint_gets_the_other_fields(folders, tmp_path):
    source = shutil.copytree(folders / "dcp", tmp_path / "source")
    forget_fields(source)
    (source / "titan_manifest.json").unlink()
    given = shutil.copytree(folders / "hf", tmp_path / "given")
    write_config(given, {"attention_dropout": 0.25, "own": [1]})
    convert(source, tmp_path / "out", to="hf", model_from=given)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["attention_dropout"], config["own"]) == (0.25, [1])


def test_another_context_length_is_the_checkpoints_own_and_noted(folders, tmp_path):
    """A trained model has that of its flavor."""
    given = shutil.copytree(folders / "hf", tmp_path / "given")
    write_config(given, {"max_position_embeddings": 512})
    report = convert(folders / "dcp", tmp_path / "out", to="hf", model_from=given)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 256
    assert "max_seq_len is the checkpoint's own, 256; --model-from has 512" in report.remarks


def test_another_context_length_of_a_dynamic_rope_is_a_contradiction(tmp_path):
    write_llama(tmp_path / "hf", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    given = shutil.copytree(tmp_path / "hf", tmp_path / "given")
    write_config(given, {"max_position_embeddings": 512})
    with pytest.raises(ConfigError, match="max_seq_len: 256 in the checkpoint, 512 in --model-from"):
        convert(tmp_path / "hf", tmp_path / "out", to="dcp", model_from=given)


def test_what_params_json_leaves_open_is_filled(tmp_path):
    model = write_llama(tmp_path / "hf", rope_scaling=None)
    write_meta(tmp_path / "meta", model)
    convert(tmp_path / "meta", tmp_path / "out", to="dcp", model_from=tmp_path / "hf")
    assert read_model_info(tmp_path / "out").args.max_seq_len == 256
    write_config(tmp_path / "hf", {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}})
    with pytest.raises(ConfigError, match=r"rope_theta: 10000.0 in the checkpoint, 3.0 in --model-from"):
        convert(tmp_path / "meta", tmp_path / "other", to="dcp", model_from=tmp_path / "hf")


def test_unset_ids_contradict_nothing(folders, bare, tmp_path):
    config = json.loads((folders / "hf" / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": 2}))  # the class's
    convert(bare, tmp_path / "out", to="dcp", model_from=folders / "hf")
    assert read_model_info(tmp_path / "out").token_ids == {"bos_token_id": 256, "eos_token_id": 257}


def test_files_around_a_lone_torch_file_are_not_its_own(titan, folders, tmp_path):
    convert(folders / "hf", tmp_path / "model.pt", to="torch")
    tokenizer = json.loads((folders / "hf" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a"], tokenizer["model"]["vocab"]["b"] = 1, 2
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    ask = ("--prompt", "def", "--max-new-tokens", "2")
    code, out, err = titan("infer", tmp_path / "model.pt", *ask, "--model-from", folders / "hf")
    assert (code, out) == titan("infer", folders / "hf", *ask)[:2] and code == 0, err


def test_diff_reads_what_says_nothing_as_the_other(folders, bare):
    assert diff(folders / "hf", bare).equal and diff(bare, folders / "dcp", model_from=folders / "hf").equal
    with pytest.raises(ConfigError, match="norm_eps"):
        diff(bare, folders / "dcp", model_from=folders / "other")


def test_the_licence_is_that_of_the_weights_of_its_folder(folders, bare, tmp_path):
    given = shutil.copytree(folders / "hf", tmp_path / "given")
    (given / "LICENSE").write_text("terms of other weights")
    (bare / "LICENSE").write_text("terms")
    convert(bare, tmp_path / "out", to="dcp", model_from=given)
    assert (tmp_path / "out" / "assets" / "LICENSE").read_text() == "terms"
    (bare / "LICENSE").unlink()
    convert(bare, tmp_path / "other", to="dcp", model_from=given)
    assert not (tmp_path / "other" / "assets" / "LICENSE").exists()
