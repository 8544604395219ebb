"""Every family against transformers: bit-equal there and back, native values and logits as they must be."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from converters.common.box import Box
from converters.common.errors import CheckpointError, UnsupportedError
from converters.families import qwen3
from converters.families.llama import HF, LLAMA_NAMINGS
from converters.families.llama2 import FLAVORS as LLAMA2_FLAVORS
from converters.families.registry import all_families, get_family
from converters.families.rules import RopeHalves
from converters.model.model_info import ModelInfo, read_model_info
from converters.naming.foreign_view import foreign_view
from converters.naming.namings import detect_naming
from converters.naming.native_view import native_view
from converters.source.weights import open_native
from tests.doors import convert
from tests.fp8_folders import read_folder
from tests.models.dense import TINY, family_of, native_logits
from tests.models.dense import write as write_tiny
from tests.unit.converters.samples import Arrays, load_dcp
from trainer.models.initial_weights import InitialWeights

TOKENS = torch.arange(40) * 7 % 97


@pytest.fixture(scope="module", params=TINY)
def model(request, tmp_path_factory):
    """(name, root): root/hf as transformers wrote it in several files, root/dcp converted from it."""
    name, root = request.param, tmp_path_factory.mktemp(request.param)
    write_tiny(root / "hf", name, dtype=torch.bfloat16, max_shard_size="40KB")
    convert(root / "hf", root / "dcp", to="dcp", source="hf")
    return name, root


def native_tensors(folder):
    """What stock dcp.load reads, and the numbers of the model."""
    info = read_model_info(folder)
    like = {p.fqn: torch.empty(p.shape, dtype=torch.bfloat16) for p in get_family(info.family).parameters(info.args)}
    return load_dcp(folder, like), info


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


def interleaved(weight, head_dim):
    """q or k from halves to pairs, the other way round than the table says it: (j, i) → (i, j) in each head."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def test_the_family_is_found_by_the_content(model):
    name, root = model
    info = read_model_info(root / "hf")
    assert info.family == family_of(name) == read_model_info(root / "dcp").family
    assert info.args == read_model_info(root / "dcp").args
    assert info.args.rope_theta == TINY[name].get("rope_theta", 10000.0)
    assert info.args.tied == ("tied" in name)


def test_native_weights_give_transformers_logits(model):
    """Rotated the family's way; the other way, which is what a permutation by habit comes to, is far off."""
    name, root = model
    weights, info = native_tensors(root / "dcp")
    weights = {fqn: tensor.double() for fqn, tensor in weights.items()}
    theirs, halves = logits(root / "hf"), info.family == "qwen3"
    right, wrong = (native_logits(weights, TOKENS, info.args, halves=h) for h in (halves, not halves))
    scale = theirs.abs().max()
    assert (right - theirs).abs().max() < 1e-4 * scale
    assert (wrong - theirs).abs().max() > 1e-2 * scale


def test_permuting_qwen3_by_habit_is_seen(tmp_path):
    """Llama's table on Qwen 3 keeps every shape, so only values tell; the family's own table has no RopeHalves."""
    write_tiny(tmp_path / "hf", "qwen3_tied", dtype=torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    (weights, info), theirs = native_tensors(tmp_path / "dcp"), logits(tmp_path / "hf")
    by_habit = dict(weights)
    for n in range(info.args.num_layers):
        for w in ("wq", "wk"):
            fqn = f"layers.{n}.attention.{w}.weight"
            by_habit[fqn] = interleaved(weights[fqn], info.args.head_dim)
            assert by_habit[fqn].shape == weights[fqn].shape
    right, wrong = (
        native_logits({k: v.double() for k, v in w.items()}, TOKENS, info.args, halves=True)
        for w in (weights, by_habit)
    )
    assert (right - theirs).abs().max() < 1e-4 * theirs.abs().max() < (wrong - theirs).abs().max() / 100
    for naming in qwen3.QWEN3.namings.values():
        assert not any(isinstance(rule.op, RopeHalves) for rule in naming.rules)
    assert sum(isinstance(rule.op, RopeHalves) for rule in HF.rules) == 4  # weights and biases of q and k


@pytest.mark.parametrize("present", [False, True])
def test_a_tied_head_may_be_there_or_not(present, tmp_path):
    """On the hub Qwen3-4B lacks lm_head, the other tied ones ship it."""
    write_tiny(tmp_path / "hf", "qwen3_tied")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    if present:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    report = convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    assert ("lm_head.weight" in report.dropped) == present
    assert "output.weight" not in open_native(tmp_path / "dcp").source.tensors
    if present:
        tensors["lm_head.weight"][3, 5] += 1
        save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(
            CheckpointError, match=r"the model is tied, but lm_head.weight differs from .*: they differ in row"
        ):
            convert(tmp_path / "hf", tmp_path / "other", to="dcp")


def test_heads_may_be_wider_than_dim_over_heads(tmp_path):
    write_tiny(tmp_path / "hf", "qwen3")
    args = read_model_info(tmp_path / "hf").args
    assert args.head_dim == 24 != args.dim // args.num_heads
    shapes = {p.fqn: p.shape for p in get_family("qwen3").parameters(args)}
    assert shapes["layers.10.attention.wq.weight"] == (96, 32) and shapes["layers.10.attention.wo.weight"] == (32, 96)
    assert shapes["layers.0.attention.q_norm.weight"] == (24,)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "head_dim"}))
    with pytest.raises(CheckpointError, match=r"q_proj.weight  is \[96, 32\], should be \[512, 32\]"):
        convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")


def test_one_file_and_many_are_one_model(tmp_path):
    for folder, size in (("one", "1GB"), ("many", "30KB")):
        write_tiny(tmp_path / folder, "qwen3_tied", max_shard_size=size)
        convert(tmp_path / folder, tmp_path / f"{folder}.dcp", to="dcp")
    assert (
        len(list((tmp_path / "many").glob("*.safetensors"))) > 1 == len(list((tmp_path / "one").glob("*.safetensors")))
    )
    one, many = (native_tensors(tmp_path / f"{folder}.dcp")[0] for folder in ("one", "many"))
    assert one.keys() == many.keys() and all(torch.equal(one[fqn], many[fqn]) for fqn in one)


@pytest.mark.parametrize(
    ("family", "flavor"),
    [
        ("llama2", "debug_gqa"),
        ("llama3", "debug_gqa"),
        ("qwen3", "debug_gqa"),
        ("qwen3", "debug_moe"),
        ("qwen3", "debug_moe_mixed"),
        ("deepseek_v3", "debug_v3"),
        ("deepseek_v3", "debug_v2_lite"),
    ],
)
def test_every_naming_is_its_own_inverse(family, flavor):
    family = get_family(family)
    args = replace(family.flavors[flavor], num_layers=12, vocab_size=11, dim=16, ffn_hidden=6)
    info, parameters = ModelInfo(family.name, args), family.parameters(args)
    native = Arrays({p.fqn: (torch.randn if p.is_trained else torch.zeros)(p.shape).numpy() for p in parameters})
    for naming in family.namings.values():
        is_moe = "moe" in flavor or family.name == "deepseek_v3"
        if is_moe and naming.name == "torchtune":
            with pytest.raises(UnsupportedError, match=r"'torchtune' has no names .*\n.*moe.expert_bias"):
                foreign_view(native, info, naming)
            continue
        theirs = foreign_view(native, info, naming)
        made = {name for expression in theirs.expressions.values() for name in expression.sources}
        assert made | theirs.ledger.dropped.keys() == native.tensors.keys()
        if not is_moe:
            assert len(theirs.tensors) == len(native.tensors)
        # Meta's names are the native ones, and those of a dense model are not fused
        called = {"meta": "native", "hf_fused": "hf_fused" if is_moe else "hf"}.get(naming.name, naming.name)
        assert detect_naming(theirs.tensors, family).name == called
        back = native_view(theirs, info, naming)
        for fqn, entry in native.tensors.items():
            assert (back.read(fqn, Box.whole(entry.shape)) == native.arrays[fqn]).all(), (naming.name, fqn)


PUBLISHED = {
    "llama2": {"7B": 6_738_415_616, "13B": 13_015_864_320, "70B": 68_976_648_192},
    "llama3": {
        "1B": 1_235_814_400,
        "3B": 3_212_749_824,
        "8B": 8_030_261_248,
        "70B": 70_553_706_496,
        "405B": 405_853_388_800,
    },
    "qwen3": {
        "0.6B": 596_049_920,
        "1.7B": 1_720_574_976,
        "4B": 4_022_468_096,
        "8B": 8_190_735_360,
        "14B": 14_768_307_200,
        "32B": 32_762_123_264,
        "30B-A3B": 30_532_122_624,
        "235B-A22B": 235_093_634_560,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name):
    family = all_families()[name]
    assert {flavor: family.num_parameters(family.flavors[flavor]) for flavor in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen3"])
def test_transformers_builds_the_same_parameters(name):
    """Names and shapes of every flavor, on the meta device."""
    family = all_families()[name]
    kinds = (Qwen3Config, Qwen3ForCausalLM) if name == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    for flavor in ("debug_gqa", "debugmodel", "1.7B" if name == "qwen3" else "7B" if name == "llama2" else "3B"):
        args = replace(family.flavors[flavor], num_layers=2)
        with torch.device("meta"):
            theirs = kinds[1](kinds[0](**family.hf_config(args)))
        shapes = {fqn: tuple(parameter.shape) for fqn, parameter in theirs.named_parameters()}
        wanted = {p.fqn: p.shape for p in family.parameters(args)}
        rules = {rule.native: rule.foreign for rule in family.namings["hf"].rules}
        ours = {}
        for fqn, shape in wanted.items():
            number = fqn.split(".")[1] if fqn.startswith("layers.") else ""
            ours[rules[fqn.replace(f"layers.{number}.", "layers.{n}.")].replace("{n}", number)] = shape
        assert ours == shapes


def test_an_old_file_that_calls_a_llama2_a_llama3_still_opens(tmp_path):
    """Before there was a family llama2, titan_model.json said llama3 of every Llama."""
    write_tiny(tmp_path / "hf", "llama2")
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    output = json.loads((tmp_path / "dcp" / "titan_model.json").read_text())
    del output["args"]["qk_norm"]  # nor was there this number
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "titan_model.json").write_text(json.dumps(output | {"family": "llama3"}))
    assert read_model_info(tmp_path / "old").family == "llama3"
    convert(tmp_path / "dcp", tmp_path / "again", to="hf", model_from=tmp_path / "old")
    assert read_folder(tmp_path / "again").keys() == read_folder(tmp_path / "hf").keys()
    assert torch.equal(logits(tmp_path / "again"), logits(tmp_path / "hf"))


def test_families_share_what_is_the_same():
    llama2, llama3 = get_family("llama2"), get_family("llama3")
    assert llama2.parameters is llama3.parameters and llama2.namings is llama3.namings is LLAMA_NAMINGS
    assert asdict(LLAMA2_FLAVORS["7B"])["rope_scaling"] is None


def test_biases_begin_at_zero_and_are_counted():
    for name, biases in (("llama3", 128 + 64 * 2 + 128 + 384 * 2 + 128), ("qwen3", 256 + 128 * 2 + 128)):
        family = get_family(name)
        plain = family.flavors["debug_gqa"]
        changed = {"attention_bias": True, "mlp_bias": name == "llama3"}
        args = replace(plain, **changed)
        assert family.num_parameters(args) == family.num_parameters(plain) + plain.num_layers * biases
        first = InitialWeights(ModelInfo(name, args), seed=1)
        zeros = [fqn for fqn in first.tensors if fqn.endswith(".bias")]
        assert len(zeros) == plain.num_layers * (7 if name == "llama3" else 4)
        assert not any(first.read(fqn, Box.whole(first.tensors[fqn].shape)).any() for fqn in zeros)
