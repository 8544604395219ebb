"""Checkpoints of torchtitan v0.2.2, whose DeepSeek model is not the published one."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from converters.common.errors import ConfigError
from converters.conversion.trained_by import TRAINED_BY
from converters.families.llama4 import FLAVORS
from converters.families.llama4_torchtitan import as_torchtitan_trained
from converters.model.model_info import read_model_info
from converters.source.weights import open_native
from converters.store.location import locate
from tests.doors import convert
from tests.models import llama4
from tests.models.deepseek import native_logits
from tests.models.deepseek import write as write_deepseek
from tests.models.dense import write as write_tiny
from tests.models.names import native_arrays
from titan_tools.cli import app
from titan_tools.commands.convert_options import Trainer
from titan_tools.infer.find import FoundCheckpoint
from titan_tools.infer.loading import is_damaged
from titan_tools.infer.ranks import TPRanks

TOKENS = torch.arange(14) * 7 % 97  # within YaRN's original length


@pytest.fixture(scope="module", params=["v3", "v2", "v2_lite"])
def foreign(request, tmp_path_factory):
    """(name, native arrays, root): root/dcp with torchtitan's names and no description, root/hf the published model."""
    root = tmp_path_factory.mktemp(request.param)
    arrays = native_arrays(write_deepseek(root / "hf", request.param))
    dcp.save({n: torch.as_tensor(a) for n, a in arrays.items()}, checkpoint_id=str(root / "dcp"), no_dist=True)
    return request.param, arrays, root


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


def test_the_output_says_what_was_trained(foreign, tmp_path):
    """Up to YaRN's original length v0.2.2 leaves YaRN out; its epsilon is 1e-5 (16B, 236B and 671B alike)."""
    name, arrays, root = foreign
    published = read_model_info(root / "hf").args
    report = convert(root / "dcp", tmp_path / "out", to="hf", model_from=root / "hf", trained_by="torchtitan-0.2.2")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_scaling"], config["max_position_embeddings"]) == (1e-5, None, 16)
    trained = replace(published, norm_eps=1e-5, rope_scaling=None)
    expected, ours = native_logits(arrays, TOKENS, trained), logits(tmp_path / "out")
    scale = expected.abs().max()
    assert (ours - expected).abs().max() < 1e-4 * scale < (logits(root / "hf") - expected).abs().max()
    said = "\n".join(report.remarks)
    assert "rope_scaling yarn with an mscale of 0.707, now none" in said and "norm_eps 1e-06, now 1e-05" in said
    assert "norms of latents" in said and "the last norm" in said
    assert ("chosen by the sum" in said) == (name == "v2")


def test_beyond_the_original_length(foreign, tmp_path):
    """Then YaRN is used, with another magnitude for the models whose published one is 0.707."""
    _, _, root = foreign
    convert(root / "dcp", tmp_path / "out", to="dcp", model_from=root / "hf", trained_by="torchtitan-0.2.2-yarn")
    args, published = read_model_info(tmp_path / "out").args, read_model_info(root / "hf").args
    scaling = replace(published.rope_scaling, mscale=0.7, mscale_all_dim=0.7)
    assert args == replace(published, norm_eps=1e-5, rope_scaling=scaling)


def test_without_the_option_it_warns(foreign, tmp_path):
    name, _, root = foreign
    report = convert(root / "dcp", tmp_path / "out", to="hf", model_from=root / "hf")
    (warning,) = [remark for remark in report.remarks if remark.startswith("WARNING")]
    assert "--trained-by torchtitan-0.2.2, torchtitan-0.2.2-yarn or titan" in warning
    assert ("groups" in warning) == (name == "v2")
    same = convert(root / "dcp", tmp_path / "same", to="hf", model_from=root / "hf", trained_by="titan")
    assert not any("WARNING" in remark or "trained" in remark for remark in same.remarks)
    ours, theirs = ((tmp_path / folder / "config.json").read_text() for folder in ("out", "same"))
    assert ours == theirs


def test_inference_warns(foreign, tmp_path, capsys):
    """Only where nothing describes the model: a conversion does, and so does config.json."""
    _, _, root = foreign
    convert(root / "dcp", tmp_path / "described", to="dcp", model_from=root / "hf")
    one = TPRanks(1, 0, torch.device("cpu"))
    for folder, warns in ((root / "dcp", True), (tmp_path / "described", False), (root / "hf", False)):
        with open_native(folder, model_from=root / "hf" if warns else None) as weights:
            assert not is_damaged(FoundCheckpoint(locate(folder), is_step=False), weights, one)
        said = " ".join(capsys.readouterr().err.split())
        assert ("if torchtitan v0.2.2 trained it, the model computed otherwise" in said) == warns
        assert ("`titan convert --trained-by torchtitan-0.2.2` makes a checkpoint" in said) == warns


def test_llama4(tmp_path):
    """Without norms of q and k, without a temperature, and the first of every four layers without positions."""
    arrays = native_arrays(llama4.write(tmp_path / "hf", "maverick", use_qk_norm=True))
    dcp.save({n: torch.tensor(a) for n, a in arrays.items()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    published = read_model_info(tmp_path / "hf").args
    assert published.norms_qk and published.temperature == 0.3
    report = convert(tmp_path / "dcp", tmp_path / "as", to="hf", model_from=tmp_path / "hf")
    (warning,) = [remark for remark in report.remarks if remark.startswith("WARNING")]
    assert "no norms of q and k, no temperature" in warning
    assert "say --trained-by torchtitan-0.2.2 or titan" in warning
    convert(tmp_path / "dcp", tmp_path / "out", to="hf", model_from=tmp_path / "hf", trained_by="torchtitan-0.2.2")
    numbers = {"norms_qk": False, "temperature": None, "temperature_length": 8192, "layers_without_positions": (0, 4)}
    trained = replace(published, **numbers)
    assert read_model_info(tmp_path / "out").args == trained
    expected, ours = llama4.native_logits(arrays, TOKENS, trained), logits(tmp_path / "out")
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    with pytest.raises(ConfigError, match="Llama 4 has no YaRN"):
        convert(tmp_path / "dcp", tmp_path / "no", to="hf", model_from=tmp_path / "hf", trained_by=TRAINED_BY[2])


@pytest.mark.parametrize(
    ("without", "num_layers", "trained"),
    [
        ((), 5, ()),
        ((3,), 5, (0, 4)),
        ((3, 7), 8, (0, 4)),
        ((0, 4), 5, (0, 4)),  # stated as v0.2.2 has them
        ((0,), 4, (0,)),
        ((0, 1, 2), 3, (0, 1, 2)),
    ],
)
def test_llama4_layers_without_positions(without, num_layers, trained):
    """Those of v0.2.2 are the layers whose number is a multiple of the step."""
    args = replace(FLAVORS["debug_scout"], num_layers=num_layers, layers_without_positions=without)
    assert as_torchtitan_trained(args, beyond_original=False).args.layers_without_positions == trained


def test_llama4_layers_that_are_not_every_so_manyth(tmp_path):
    numbers = {"no_rope_layers": [1, 1, 0, 1, 0]}
    arrays = native_arrays(llama4.write(tmp_path / "hf", "maverick", **numbers))
    dcp.save({n: torch.tensor(a) for n, a in arrays.items()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    asked = {"to": "dcp", "model_from": tmp_path / "hf"}
    with pytest.raises(ConfigError, match=r"layers without positions \[2, 4\] of 5"):
        convert(tmp_path / "dcp", tmp_path / "out", trained_by="torchtitan-0.2.2", **asked)
    convert(tmp_path / "dcp", tmp_path / "out", **asked)  # of another trainer
    assert read_model_info(tmp_path / "out").args.layers_without_positions == (2, 4)


@pytest.mark.parametrize("trained_by", TRAINED_BY)
def test_the_option_is_refused_where_it_means_nothing(trained_by, tmp_path):
    write_deepseek(tmp_path / "hf")
    assert not any("WARNING" in remark for remark in convert(tmp_path / "hf", tmp_path / "dcp", to="dcp").remarks)
    for src in ("hf", "dcp"):
        with pytest.raises(ConfigError, match="is not a checkpoint of torchtitan"):
            convert(tmp_path / src, tmp_path / "out", to="torch", trained_by=trained_by)
    write_tiny(tmp_path / "llama", "llama3")
    with pytest.raises(ConfigError, match="is a llama3, which torchtitan computes alike"):
        convert(tmp_path / "llama", tmp_path / "out", to="dcp", trained_by=trained_by)
    assert not (tmp_path / "out").exists()


def test_command_line(foreign, tmp_path):
    _, _, root = foreign
    assert tuple(each.value for each in Trainer) == TRAINED_BY
    command = ["convert", "dcp-to-hf", root / "dcp", tmp_path / "out", "--model-from", root / "hf", "--json"]
    done = CliRunner().invoke(app, [*map(str, command), "--trained-by", "torchtitan-0.2.2"])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == 1e-5
