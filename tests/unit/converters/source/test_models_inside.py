"""Checkpoints that hold several models: none is taken unasked, and `--select` takes one."""

import json

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from converters.common.errors import ConfigError, UnsupportedError
from converters.diff import diff
from converters.inspect import inspect_checkpoint
from converters.source.models_inside import SeveralModels
from converters.source.open import open_checkpoint
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from converters.verify import verify
from tests.doors import convert, reshard
from tests.unit.converters.samples import save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
)  # fmt: skip
SMALL = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 1, "hidden_size": 8})


def state(seed: int, config=CONFIG) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return dict(LlamaForCausalLM(config).state_dict())


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """A and B under native names."""
    folder = tmp_path_factory.mktemp("native")
    for name, weights in (("a", A), ("b", B)):
        convert(put(folder / name, weights, "safetensors"), folder / f"{name}.pt", to="torch")
    return [dict(torch.load(folder / f"{name}.pt")) for name in ("a", "b")]


A, B = state(0), state(1)
LAYOUTS = {
    "policy and reference": ({"reference": {"model": B}, "policy": {"model": A}}, "policy.model", "reference.model"),
    "actors": ({"actor": A, "old_actor": B}, "actor", "old_actor"),
    "ema": ({"ema": {"shadow": {"module": B}}, "model": A, "step": 3}, "model", "ema.shadow.module"),
    "list": ({"models": [B, A]}, "models.1", "models.0"),
    "wrapped": (
        {"student": {f"module._orig_mod.{n}": t for n, t in A.items()}, "teacher": B},
        "student.module",
        "teacher",
    ),
    "beside": ({**A, "generator": B}, ".", "generator"),
    "base models": (
        {
            "a": {n.removeprefix("model."): t for n, t in A.items()},
            "b": {n.removeprefix("model."): t for n, t in B.items()},
        },
        "a",
        "b",
    ),
    "other shapes": ({"teacher": state(2, SMALL), "student": A}, "student", "teacher"),
    "flat": ({f"{k}.{n}": t for k, s in (("r.old", B), ("p", A)) for n, t in s.items()}, "p", "r.old"),
}


def put(folder, content, container: str):
    folder.mkdir()
    CONFIG.save_pretrained(folder)
    if container == "torch":
        torch.save(content, folder / "weights.pt")
    elif container == "dcp":
        save_dcp(folder, content)
    else:
        flat = {name: tensor.clone() for name, tensor in content.items()}
        safetensors.torch.save_file(flat, folder / "model.safetensors")
    return folder


def values(path, **options) -> dict[str, torch.Tensor]:
    with open_native(path, **options) as weights:
        return {fqn: torch.from_numpy(weights.read(fqn)) for fqn in weights.tensors}


@pytest.mark.parametrize("container", ["torch", "dcp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_several_models_one_must_be_selected(layout, container, tmp_path):
    content, name, other = LAYOUTS[layout]
    folder = put(tmp_path / "src", content, container)
    with pytest.raises(SeveralModels) as error:
        open_checkpoint(folder)
    assert {line.strip().split(": ")[0] for line in error.value.message.splitlines()[1:]} == {name, other}
    assert set(error.value.tries) == {f"--select {name}", f"--select {other}"}
    alone = put(tmp_path / "alone", A, "safetensors")
    expected = values(alone)
    found = values(folder, select=name)
    assert found.keys() == expected.keys() and all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)


def test_safetensors_with_two_prefixes(tmp_path):
    folder = put(tmp_path / "src", LAYOUTS["flat"][0], "safetensors")
    with pytest.raises(SeveralModels, match=r"holds 2 models:\n  p: 21 tensors, 4,944 parameters.*\n  r.old: 21"):
        convert(folder, tmp_path / "out", to="dcp")
    assert torch.equal(values(folder, select="p")["norm.weight"], A["model.norm.weight"])


def test_every_command_refuses_and_selects(tmp_path):
    folder = put(tmp_path / "src", LAYOUTS["policy and reference"][0], "dcp")
    alone = put(tmp_path / "alone", A, "safetensors")
    for command in (
        lambda **select: convert(folder, tmp_path / "hf", to="hf", **select),
        lambda **select: reshard(folder, tmp_path / "dcp", drop=["reference"], **select),
        lambda **select: inspect_checkpoint(folder, **select),
        lambda **select: verify(folder, **select),
    ):
        with pytest.raises(SeveralModels, match=r"(?s)reference\.model.*policy\.model"):
            command()
        with pytest.raises(ConfigError, match="nobody is no model of"):
            command(select="nobody")
        command(select="policy")
    for name in ("hf", "dcp"):
        manifest = read_manifest(tmp_path / name)
        assert manifest is not None and manifest.selected == "policy.model"
        assert diff(tmp_path / name, alone).equal and verify(tmp_path / name).ok
    with pytest.raises(SeveralModels):
        diff(folder, alone)
    assert diff(folder, alone, select=["policy"]).equal
    report = diff(folder, folder, select=["policy", "reference"])
    assert not report.equal and report.differences[0].name == "tok_embeddings.weight"
    with pytest.raises(ConfigError, match="hold one model each"):
        diff(alone, alone, select=["policy"])
    assert inspect_checkpoint(folder, select="reference").selected == "reference.model"


def test_a_model_that_is_selected_needs_no_selection_in_the_output(native, tmp_path):
    """Native models in one checkpoint are resharded together, and the output knows which one is the model."""
    a, b = native
    folder = put(tmp_path / "src", {"old": b, "new": a}, "dcp")
    report = reshard(folder, tmp_path / "out", select="new")
    assert report.selected == "new" and report.sections == {"old": len(b), "model": len(a)}
    (tmp_path / "out/titan_model.json").touch()
    verify(tmp_path / "out", accept=True)
    assert json.loads((tmp_path / "out/titan_manifest.json").read_text())["selected"] == "new"
    assert torch.equal(values(tmp_path / "out")["norm.weight"], a["norm.weight"])
    again = open_checkpoint(tmp_path / "out", select="old")
    assert again.selected == "old" and again.other_models == ("",)


def test_of_several_optimizers_that_of_the_selected_model_is_taken(native, tmp_path):
    a, b = native

    def with_moments(weights):
        return {"model": weights, "optim": {f"state.{n}.exp_avg": t + 1 for n, t in weights.items()}}

    folder = put(tmp_path / "src", {"critic": with_moments(b), "actor": with_moments(a)}, "dcp")
    reshard(folder, tmp_path / "out", select="actor", drop=["critic"])
    loaded = {"optimizer": {"state.tok_embeddings.weight.exp_avg": torch.zeros(32, 16)}}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert torch.equal(loaded["optimizer"]["state.tok_embeddings.weight.exp_avg"], a["tok_embeddings.weight"] + 1)


MOMENT = "state.tok_embeddings.weight.exp_avg"
# layout → the model that is selected, and the place of its optimizer; "" where that is refused
OPTIMIZERS = {
    "average, trained one": (("model", "ema"), ("optimizer",), "model", "optimizer"),
    "average": (("model", "ema"), ("optimizer",), "ema", ""),
    "one of two, in torchtitan's old dict": (("model", "critic"), ("optimizer",), "model", ""),
    "average, other name": (("model", "ema"), ("optim",), "ema", ""),
    "average in the root": (("", "ema"), ("optimizer",), ".", "optimizer"),
    "not the root's": (("", "ema"), ("optimizer",), "ema", ""),
    "two that are trained": (("generator", "discriminator"), ("optimizer",), "generator", ""),
    "list": (("models.0", "models.1"), ("optimizers.0",), "models.0", ""),
    "reference": (("policy.model", "ref.model"), ("policy.optim",), "policy", "policy.optim"),
    "only of the other": (("policy.model", "ref.model"), ("policy.optim",), "ref", "none"),
    "old": (("actor", "old_actor"), ("opt",), "actor", "opt"),
    "by name": (("actor", "critic"), ("optimizer_critic",), "critic", "optimizer_critic"),
    "another's by name": (("actor", "critic"), ("optimizer_critic",), "actor", ""),
    "one of two by name": (("actor", "critic"), ("optimizers.actor", "optimizers.critic"), "actor", ""),
    "deeper": (("app.student", "app.teacher"), ("app.optimizer",), "app.student", "app.optimizer"),
}


@pytest.mark.parametrize("layout", OPTIMIZERS)
def test_an_optimizer_is_taken_only_where_it_is_that_of_the_selected_model(layout, native, tmp_path):
    models, optimizers, select, place = OPTIMIZERS[layout]
    shapes = native[0]
    content: dict = {}
    for number, path in enumerate(models):
        at = content
        for key in filter(None, path.split(".")):
            at = at.setdefault(key, {})
        at |= {name: torch.full_like(tensor, number) for name, tensor in shapes.items()}
    for number, path in enumerate(optimizers):
        at = content
        for key in path.split("."):
            at = at.setdefault(key, {})
        at |= {f"state.{name}.exp_avg": torch.full_like(tensor, 10 + number) for name, tensor in shapes.items()}
    folder = put(tmp_path / "src", content, "dcp")
    if not place:
        with pytest.raises(
            UnsupportedError, match=f"(?s)not the optimizer of {select}.*{optimizers[-1]}: of "
        ) as error:
            reshard(folder, tmp_path / "out", select=select)
        (line,) = error.value.tries
        drop = line.removeprefix("--drop ").split(",")
        reshard(folder, tmp_path / "out", select=select, drop=drop)
        names = open_checkpoint(tmp_path / "out").tensors
        assert (f"optimizer.{MOMENT}" in names) == (len(optimizers) > 1)
        return
    report = reshard(folder, tmp_path / "out", select=select)
    names = open_checkpoint(tmp_path / "out").tensors
    remarks = [text for text in report.remarks if text.startswith("optimizer: ")]
    if place == "none":
        assert f"optimizer.{MOMENT}" not in names and f"{optimizers[0]}.{MOMENT}" in names and not remarks
        return
    assert remarks == [f"optimizer: {place}, taken as that of {report.selected}"]
    loaded = {"optimizer": {MOMENT: torch.zeros(32, 16)}}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert (loaded["optimizer"][MOMENT] == 10).all()
    again = reshard(tmp_path / "out", tmp_path / "again")
    assert again.sections["optimizer"] == report.sections["optimizer"]


def test_one_model_is_not_selected_by_another_name(tmp_path):
    folder = put(tmp_path / "src", {"model": A}, "torch")
    assert values(folder, select="model").keys() == values(folder).keys()
    with pytest.raises(ConfigError, match="policy is no model of") as error:
        open_checkpoint(folder, select="policy")
    assert error.value.hint == "it holds one model, model, so none need be selected"


def test_dicts_of_equal_names_of_no_known_family(tmp_path):
    gpt = {f"h.{n}.{name}": torch.rand(2) for n in range(2) for name in ("a", "b", "c", "d")}
    torch.save({"left": gpt, "right": gpt}, tmp_path / "weights.pt")
    with pytest.raises(SeveralModels, match=r"(?s)left.*right"):
        inspect_checkpoint(tmp_path / "weights.pt")
    assert len(open_checkpoint(tmp_path / "weights.pt", select="right").tensors) == 16


def test_parts_that_are_no_second_model(tmp_path):
    """Moments, an encoder of images, and a part of the weights."""
    vision = {f"vision.encoder.{n}": t for n, t in A.items() if "layers" in n}
    moments = {"optimizer": {"exp_avg": A, "state": {"exp_avg": A}}, "optim": {"masters": A}}
    part = {"averaged": {n: t for n, t in A.items() if "norm" in n}}
    for number, content in enumerate(({"model": A, **moments}, {"model": A, **part}, {**A, **vision})):
        assert open_checkpoint(put(tmp_path / str(number), content, "torch")).selected is None
    with pytest.raises(UnsupportedError, match="models"):
        open_checkpoint(put(tmp_path / "both", {"model": A, "masters": A}, "torch"))
