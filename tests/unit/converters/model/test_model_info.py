"""converters/model/model_info.py and json_file.py: what a folder says about its weights, or that it says nothing."""

import json
import re
import shutil
from dataclasses import asdict, astuple, dataclass, replace

import pytest

from converters.common.errors import CheckpointError, UnsupportedError
from converters.families import registry
from converters.families.args import DecoderArgs
from converters.families.llama3 import FLAVORS, LLAMA3
from converters.model.model_info import ModelInfo, read_model_info, write_hf_config, write_meta_params, write_model_info
from converters.source.weights import open_native
from tests.doors import convert
from tests.models.dense import write as write_tiny

INFO = ModelInfo("llama3", FLAVORS["debug_tied"])


def test_titan_s_own_file(tmp_path):
    write_model_info(tmp_path, INFO)
    assert read_model_info(tmp_path) == INFO


def test_hf_and_meta(tmp_path):
    write_hf_config(
        tmp_path, ModelInfo("llama3", INFO.args, {}, {"bos_token_id": 7, "eos_token_id": [8, 9]}), dtype="float16"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float16"
    found = read_model_info(tmp_path)
    assert found.args == INFO.args and found.token_ids == {"bos_token_id": 7, "eos_token_id": [8, 9]}
    meta = tmp_path / "meta"
    meta.mkdir()
    write_meta_params(meta, INFO)
    (meta / "consolidated.00.pth").touch()
    assert read_model_info(meta / "consolidated.00.pth").args.rope_scaling == INFO.args.rope_scaling


@dataclass(frozen=True, slots=True)
class OwnArgs(DecoderArgs):
    logit_scale: float = 0.5
    window: int | None = None
    rotary: str = "full"


@pytest.fixture
def own_family(monkeypatch):
    monkeypatch.setitem(registry._FAMILIES, "own", replace(LLAMA3, name="own", args_type=OwnArgs))


def test_numbers_that_a_family_adds_are_kept(tmp_path, own_family):
    args = OwnArgs(*astuple(FLAVORS["debug_tied"])[:7], logit_scale=2, window=64)
    write_model_info(tmp_path, ModelInfo("own", args))
    found = read_model_info(tmp_path)
    assert found.args == args and type(found.args) is OwnArgs
    content = json.loads((tmp_path / "titan_model.json").read_text())
    del content["args"]["rotary"]  # written before the family had it
    (tmp_path / "titan_model.json").write_text(json.dumps(content))
    assert read_model_info(tmp_path).args == args


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logit_scale": "2"}, "logit_scale = 2: expected the type of 0.5"),
        ({"logit_scale": True}, "logit_scale = True: expected the type of 0.5"),
        ({"rotary": None}, "rotary = None: expected the type of 'full'"),
        ({"windows": 64}, "unknown  windows"),
    ],
)
def test_numbers_that_a_family_adds_are_checked(tmp_path, own_family, change, said):
    numbers = asdict(OwnArgs(*astuple(FLAVORS["debug_tied"])[:7])) | change
    (tmp_path / "titan_model.json").write_text(json.dumps({"family": "own", "args": numbers}))
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_model_info(tmp_path)


def test_a_family_that_is_not_known_here_is_to_be_imported(tmp_path):
    write_model_info(tmp_path, ModelInfo("nobodys", FLAVORS["debug_tied"]))
    with pytest.raises(UnsupportedError, match="'nobodys'") as raised:
        read_model_info(tmp_path)
    assert raised.value.tries == ("titan --import MODULE …",)


def test_two_files_that_describe_other_models(tmp_path):
    """titan_model.json is what titan reads, so an edited params.json or config.json there may not say otherwise."""
    write_tiny(tmp_path / "hf", "llama2")
    convert(tmp_path / "hf", tmp_path / "meta", to="meta")
    folder = shutil.copytree(tmp_path / "meta", tmp_path / "copy", ignore=shutil.ignore_patterns("titan_manifest.json"))
    own = open_native(folder).info
    shutil.copy(tmp_path / "hf" / "config.json", folder)
    assert open_native(folder).info.args == own.args
    for name, key in (("config.json", "rms_norm_eps"), ("params.json", "norm_eps")):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {key: 0.25}))
        with pytest.raises(CheckpointError, match=rf"norm_eps: 1e-06 in titan_model.json, 0.25 in {name}"):
            open_native(folder)
        (folder / name).write_text(json.dumps(content))


def test_of_a_params_json_only_what_it_can_state_is_compared(tmp_path):
    write_tiny(tmp_path / "hf", "llama3")
    convert(tmp_path / "hf", tmp_path / "meta", to="meta")
    folder = shutil.copytree(tmp_path / "meta", tmp_path / "copy", ignore=shutil.ignore_patterns("titan_manifest.json"))
    model = json.loads((folder / "titan_model.json").read_text())
    model["args"]["rope_scaling"]["original_max_position_embeddings"] = 64
    (folder / "titan_model.json").write_text(json.dumps(model))
    assert open_native(folder).info.args.rope_scaling.original_max_position_embeddings == 64
    params = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps(params | {"use_scaled_rope": False}))
    with pytest.raises(CheckpointError, match=r"rope_scaling.factor: 8.0 in titan_model.json, None in params.json"):
        open_native(folder)


def test_a_folder_that_says_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="describes the model") as error:
        read_model_info(tmp_path)
    assert "--model-from" in error.value.tries[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("version https://git-lfs.github.com/spec/v1", "not JSON"),
        ("[]", "JSON list"),
        ("{}", "lacks family or args"),
        ('{"family": "llama3", "args": {"dim": 1, "depth": 2}}', "unknown  depth"),
    ],
)
def test_a_damaged_file(tmp_path, content, message):
    (tmp_path / "titan_model.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_model_info(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"qk_norm": True}, "unknown  qk_norm = True"), ({"qk_norm": 1}, "unknown  qk_norm = 1")],
)
def test_numbers_that_the_family_has_no_names_for(tmp_path, change, said):
    content = {"family": "llama3", "args": asdict(INFO.args) | change}
    (tmp_path / "titan_model.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as error:
        read_model_info(tmp_path)
    assert said in error.value.message


def test_unknown_families(tmp_path):
    (tmp_path / "titan_model.json").write_text('{"family": "gpt5", "args": {}}')
    with pytest.raises(UnsupportedError, match="gpt5"):
        read_model_info(tmp_path)
    (tmp_path / "titan_model.json").unlink()
    (tmp_path / "config.json").write_text(
        json.dumps(LLAMA3.hf_config(INFO.args) | {"architectures": ["MambaForCausalLM"]})
    )
    with pytest.raises(UnsupportedError, match="MambaForCausalLM"):
        read_model_info(tmp_path)
