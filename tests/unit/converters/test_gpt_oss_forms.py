"""GPT-OSS in every form that is stored: the same native values, and back bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.common.errors import CheckpointError, TitanError, UnsupportedError
from converters.diff import diff
from converters.families.gpt_oss import FLAVORS
from converters.families.gpt_oss_config import _RELEASE as RELEASE
from converters.families.gpt_oss_config import config_of, from_release, release_config
from converters.families.registry import get_family, read_hf_config
from converters.formats.base import OutputOptions
from converters.formats.registry import get_format
from converters.inspect import inspect_checkpoint
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import read_model_info
from converters.quantized.mxfp4_scheme import Mxfp4Scheme
from converters.quantized.quantization import read_quantization
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from converters.verify import verify
from tests.doors import convert
from tests.fp8_folders import read_folder
from tests.models.gpt_oss import CONFIG, dequantize, quantize, save, write_mxfp4
from tests.models.gpt_oss import write as write_gpt_oss
from tests.unit.converters.samples import assert_same, load_dcp
from trainer.config.sections import Checkpoint
from trainer.job.chosen_model import refuse_other_form

MATRICES = ("gate_up_proj", "down_proj")
MXFP4 = OutputOptions(quantize="mxfp4")
FORMS = (
    *("HF mxfp4", "HF bf16", "HF floating blocks", "OpenAI mxfp4", "OpenAI bf16"),
    *("DCP", "torch file", "torchtitan's newest names"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """hf: in bfloat16, as transformers saves it; mx: as it is published; dcp: made of mx."""
    root = tmp_path_factory.mktemp("gpt_oss")
    write_gpt_oss(root / "hf")
    write_mxfp4(root / "mx", root / "hf")
    convert(root / "mx", root / "dcp", to="dcp")
    return root


def values_of(mx):
    """The values of a folder in mxfp4, under the names of transformers' class."""
    held = read_folder(mx)
    values = {name: tensor for name, tensor in held.items() if not name.endswith(("_blocks", "_scales"))}
    for name in (name.removesuffix("_blocks") for name in held if name.endswith("_blocks")):
        values[name] = dequantize(held[f"{name}_blocks"], held[f"{name}_scales"]).mT.contiguous()
    return values


def native(folder):
    info = read_model_info(folder)
    like = {p.fqn: torch.empty(p.shape, dtype=torch.bfloat16) for p in get_family("gpt_oss").parameters(info.args)}
    like |= {name: tensor.float() for name, tensor in like.items() if name.endswith("expert_bias")}
    return load_dcp(folder, like)


@pytest.mark.parametrize("through", ["dcp", "dcp for a mesh", "torch"])
def test_mxfp4_there_and_back(root, tmp_path, through):
    options = OutputOptions(mesh=MeshShape(dp_shard=3, pp=2)) if "mesh" in through else OutputOptions()
    convert(root / "mx", tmp_path / "mx", to=through.split()[0], options=options)
    assert verify(tmp_path / "mx").ok
    convert(tmp_path / "mx", tmp_path / "back", to="hf")
    assert_same(read_folder(tmp_path / "back"), values_of(root / "mx"))
    assert verify(tmp_path / "back").ok
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert "quantization_config" not in config and config["layer_types"][:2] == ["sliding_attention", "full_attention"]


def test_there_and_back_in_mxfp4(root, tmp_path):
    kept = OutputOptions(quantize="mxfp4", scales_from=root / "mx")
    report = convert(root / "dcp", tmp_path / "same", to="hf", options=kept)
    assert_same(read_folder(tmp_path / "same"), read_folder(root / "mx"))
    assert report.moved_scales == 0 and verify(tmp_path / "same").ok
    # digests are of values: those of a stack are compared with the manifest of its codes
    path = tmp_path / "same/model.safetensors"
    manifests = [read_manifest(folder).tensors for folder in (root / "dcp", tmp_path / "same")]
    names = "layers.1.moe.experts.mlp1_weight", "model.layers.1.mlp.experts.gate_up_proj_blocks"
    assert manifests[0][names[0]].digest == manifests[1][names[1]].digest
    assert manifests[1][names[1]].digest_shape == manifests[0][names[0]].shape
    convert(tmp_path / "same", tmp_path / "dcp", to="dcp")
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    data[start + header[BLOCKS]["data_offsets"][0] + 77] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="changed or damaged"):
        convert(tmp_path / "same", tmp_path / "x", to="dcp")
    failed = [check for check in verify(tmp_path / "same").checks if check.outcome == "failed"]
    assert [check.name for check in failed] == ["files", "values"]
    assert verify(tmp_path / "same", accept=True).ok and verify(tmp_path / "same").ok


def test_known_scales_that_are_too_large_are_not_kept(root, tmp_path):
    """Of the same model, and of zeros, whose scale says nothing."""
    held = read_folder(root / "mx")
    for name in (name for name in held if name.endswith("_scales")):
        held[name] += 6
    other = save(tmp_path / "other", held, root / "mx", CONFIG)
    report = convert(
        root / "dcp", tmp_path / "out", to="hf", options=OutputOptions(quantize="mxfp4", scales_from=other)
    )
    assert report.moved_scales == report.num_scales
    assert_same(values_of(tmp_path / "out"), values_of(root / "mx"))
    held = read_folder(root / "mx")
    name = "model.layers.1.mlp.experts.down_proj"
    held[f"{name}_blocks"][3, 5, 1] &= 0x99  # largest code 1 (0.5): the rule's scale is an eighth
    held[f"{name}_blocks"][3, 5, 1] |= 0x01
    held[f"{name}_blocks"][4, 7, 0] &= 0x88
    held[f"{name}_scales"][4, 7, 0] = 250
    small = save(tmp_path / "small", held, root / "mx", CONFIG)
    convert(small, tmp_path / "dcp", to="dcp")
    report = convert(
        tmp_path / "dcp", tmp_path / "same", to="hf", options=OutputOptions(quantize="mxfp4", scales_from=small)
    )
    assert report.moved_scales == 0
    assert_same(read_folder(tmp_path / "same"), held)


def test_transformers_dequantizes_the_published_form_to_the_same_logits(root, tmp_path):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    convert(root / "mx", tmp_path / "ours", to="hf")
    convert(root / "dcp", tmp_path / "mxfp4", to="hf", options=MXFP4)
    tokens = torch.arange(48)[None] * 7 % 97
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)(tokens).logits
        for folder in (root / "mx", tmp_path / "mxfp4"):
            how = Mxfp4Config(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.bfloat16)
            assert torch.equal(model(tokens).logits, ours)


def test_openai_s_release_has_other_names_and_one_matrix_for_q_k_and_v(root, tmp_path):
    report = convert(root / "dcp", tmp_path / "oa", to="openai", options=OutputOptions(scales_from=root / "mx"))
    assert report.moved_scales == 0 and verify(tmp_path / "oa").ok
    ours, theirs = read_folder(tmp_path / "oa"), read_folder(root / "mx")
    assert_same(ours, by_openai_s_names(theirs))
    config = json.loads((tmp_path / "oa/config.json").read_text())
    assert config["num_experts"] == 12 and config["rope_scaling_factor"] == 4.0 and "model_type" not in config
    dtypes = json.loads((tmp_path / "oa/dtypes.json").read_text())
    assert dtypes.keys() == ours.keys() and dtypes["block.2.mlp.mlp2_weight.scales"] == "UE8"
    # the model card's config.json adds what OpenAI's does not say
    published = json.loads((root / "mx/config.json").read_text()) | {"router_aux_loss_coef": 0.9, "eos_token_id": 5}
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/config.json").write_text(json.dumps(published))
    convert(tmp_path / "oa", tmp_path / "dcp", to="dcp", source="openai", model_from=tmp_path / "beside")
    assert diff(tmp_path / "dcp", root / "dcp").equal
    report = convert(tmp_path / "oa", tmp_path / "mx", to="hf", options=MXFP4)
    assert report.moved_scales == 0 and report.scales_of == str(tmp_path / "oa")
    assert_same(read_folder(tmp_path / "mx"), theirs)


def by_openai_s_names(theirs):
    """Tensors of a folder in mxfp4 as OpenAI's release has them."""
    expected = {
        "embedding.weight": theirs["model.embed_tokens.weight"],
        "unembedding.weight": theirs["lm_head.weight"],
        "norm.scale": theirs["model.norm.weight"],
    }
    for n in range(3):
        of, its = f"block.{n}", f"model.layers.{n}"
        for x in ("weight", "bias"):
            expected[f"{of}.attn.qkv.{x}"] = torch.cat([theirs[f"{its}.self_attn.{p}_proj.{x}"] for p in "qkv"])
            expected[f"{of}.attn.out.{x}"] = theirs[f"{its}.self_attn.o_proj.{x}"]
            expected[f"{of}.mlp.gate.{x}"] = theirs[f"{its}.mlp.router.{x}"]
        expected[f"{of}.attn.sinks"] = theirs[f"{its}.self_attn.sinks"]
        expected[f"{of}.attn.norm.scale"] = theirs[f"{its}.input_layernorm.weight"]
        expected[f"{of}.mlp.norm.scale"] = theirs[f"{its}.post_attention_layernorm.weight"]
        for number, name in ((1, "gate_up_proj"), (2, "down_proj")):
            expected[f"{of}.mlp.mlp{number}_bias"] = theirs[f"{its}.mlp.experts.{name}_bias"]
            for end in ("blocks", "scales"):
                expected[f"{of}.mlp.mlp{number}_weight.{end}"] = theirs[f"{its}.mlp.experts.{name}_{end}"]
    return expected


def with_openai_s_values(mx):
    """What OpenAI's class holds in memory: the experts as values, [experts, out, in] as their codes."""
    held = by_openai_s_names(read_folder(mx))
    values = {name: tensor for name, tensor in held.items() if not name.endswith((".blocks", ".scales"))}
    for name in (name.removesuffix(".blocks") for name in held if name.endswith(".blocks")):
        values[name] = dequantize(held[f"{name}.blocks"], held[f"{name}.scales"])
    return values


def by_torchtitan_s_newest_names(tensors):
    newest = {}
    for name, tensor in tensors.items():
        name = name.replace("attention.w", "attention.qkv_linear.w").replace("qkv_linear.wo", "wo")
        name = name.replace("output.weight", "lm_head.weight").replace("moe.expert_bias", "moe.expert_bias_E")
        for ours, letters in {"mlp1_weight": "EGD", "mlp1_bias": "EG", "mlp2_weight": "EDF", "mlp2_bias": "ED"}.items():
            name = name.replace(f"experts.{ours}", f"routed_experts.inner_experts.{ours}_{letters}")
        newest[name] = tensor
    return newest


@pytest.mark.parametrize("source", FORMS)
def test_every_form_becomes_every_other_bit_for_bit(root, tmp_path, source):
    """Each form of the same model is written here, not by titan, but for the DCP that other tests compare."""
    mx, values, ours = read_folder(root / "mx"), values_of(root / "mx"), native(root / "dcp")
    src, config = tmp_path / "src", json.loads((root / "mx/config.json").read_text())
    match source:
        case "HF mxfp4":
            src = root / "mx"
        case "HF bf16":
            save(src, values, root / "mx", None)
        case "HF floating blocks":
            blocks = {f"{n}_blocks" if n.endswith(MATRICES) else n: t for n, t in values.items()}
            save(src, blocks, root / "mx", None)
        case "OpenAI mxfp4":
            save(src, by_openai_s_names(mx), root / "mx", None, config=release_config(read_hf_config(config)[1]))
        case "OpenAI bf16":
            held = with_openai_s_values(root / "mx")
            save(src, held, root / "mx", None, config=release_config(read_hf_config(config)[1]))
        case "DCP":
            src = root / "dcp"
        case "torch file":
            torch.save(ours, src := tmp_path / "src.pt")
        case "torchtitan's newest names":
            torch.save(by_torchtitan_s_newest_names(ours), src := tmp_path / "src.pt")
    model_from, kept = root / "hf" if src.suffix == ".pt" else None, {"scales_from": root / "mx"}
    for to, options, expected in (
        ("hf", OutputOptions(quantize="mxfp4", **kept), mx),
        ("hf", OutputOptions(), values),
        ("openai", OutputOptions(**kept), by_openai_s_names(mx)),
        ("dcp", OutputOptions(), ours),
        ("torch", OutputOptions(), ours),
    ):
        out = tmp_path / (f"{to}.pt" if to == "torch" else f"{to} {options.quantize}")
        convert(src, out, to=to, options=options, model_from=model_from)
        found = torch.load(out) if to == "torch" else native(out) if to == "dcp" else read_folder(out)
        assert_same(found, expected)


def test_keys_and_values_exchanged_are_named(root, tmp_path):
    """OpenAI's names have them as one matrix, as they have nothing of gate and up."""
    convert(root / "dcp", tmp_path / "hf", to="hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(file)
    k, v = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "kv")
    tensors[k], tensors[v] = tensors[v], tensors[k]
    save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / "hf/titan_manifest.json").unlink()
    found = {each.name: each.detail for each in diff(tmp_path / "hf", root / "dcp").differences}
    wk, wv = (f"layers.1.attention.{x}.weight" for x in ("wk", "wv"))
    assert found.keys() == {wk, wv}
    assert found[wk].startswith(f"equal to {wv}: the two are swapped")
    assert found[wv].startswith(f"equal to {wk}: the two are swapped")


def floating(root, tmp_path, *, transposed, numbers=(), config=None):
    """A floating export under the names of codes, and what it should be read as."""
    source = root / "hf"
    if numbers:
        source = tmp_path / "other"
        write_gpt_oss(source, **dict(numbers))
    held, made = read_folder(source), {}
    for name, tensor in held.items():
        if name.endswith(MATRICES):
            made[f"{name}_blocks"] = tensor if transposed else tensor.mT.contiguous()
        else:
            made[name] = tensor
    return save(tmp_path / "floating", made, source, config), held


@pytest.mark.parametrize("config", [None, CONFIG], ids=["no config", "stale config"])
@pytest.mark.parametrize("numbers", [(), (("intermediate_size", 64),)], ids=["other widths", "square down"])
@pytest.mark.parametrize("transposed", [False, True], ids=["torchtitan's", "transformers'"])
def test_floating_blocks_are_read_as_gate_up_s_shape_says(root, tmp_path, transposed, numbers, config):
    src, expected = floating(root, tmp_path, transposed=transposed, numbers=numbers, config=config)
    convert(src, tmp_path / "back", to="hf")
    assert_same(read_folder(tmp_path / "back"), expected)
    naming = "hf_mxfp4_resaved" if transposed else "hf_mxfp4"
    assert inspect_checkpoint(src).naming == naming
    assert any(naming in check.detail for check in verify(src).checks)


def test_floating_blocks_that_no_shape_explains_are_refused(root, tmp_path):
    src, _ = floating(root, tmp_path, transposed=False, numbers=(("intermediate_size", 32),))
    for ask in (lambda: convert(src, tmp_path / "x", to="dcp"), lambda: open_native(src)):
        with pytest.raises(CheckpointError, match="no shape says which") as caught:
            ask()
        assert "model.layers.0.mlp.experts.gate_up_proj_blocks is bfloat16" in caught.value.message
    assert not (tmp_path / "x").exists()
    names = [check for check in verify(src).checks if check.name == "names and shapes"]
    assert names[0].outcome == "failed"


@pytest.mark.parametrize("transposed", [False, True], ids=["torchtitan's", "transformers'"])
def test_without_gate_up_down_s_shape_says_how_floating_blocks_lie(root, tmp_path, transposed):
    numbers = ((), (("intermediate_size", 64),))
    for place, widths in zip(("wide", "square"), numbers, strict=True):
        (tmp_path / place).mkdir()
        src, expected = floating(root, tmp_path / place, transposed=transposed, numbers=widths)
        held = {name: t for name, t in read_folder(src).items() if not name.endswith("gate_up_proj_blocks")}
        src, out = save(tmp_path / place / "part", held, src, None), tmp_path / place / "out"
        if widths:  # no shape says it
            with pytest.raises(
                CheckpointError, match="layers.0.mlp.experts.down_proj_blocks is bfloat16.*no shape says"
            ):
                convert(src, out, to="hf", allow_missing=True)
            continue
        assert convert(src, out, to="hf", allow_missing=True).missing
        assert_same(read_folder(out), {n: t for n, t in expected.items() if not n.endswith("gate_up_proj")})


def test_one_layer_that_lies_otherwise_is_an_error(root, tmp_path):
    src, _ = floating(root, tmp_path, transposed=True)
    held = read_folder(src)
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    held[name] = held[name].mT.contiguous()
    src = save(tmp_path / "mixed", held, src, None)
    with pytest.raises(CheckpointError) as caught:
        convert(src, tmp_path / "x", to="dcp")
    assert "model.layers.0.mlp.experts.gate_up_proj_blocks  is [12, 64, 192], should be [12, 192, 64]" in (
        caught.value.message
    )


def test_a_checkpoint_of_two_element_types_is_read_as_it_is(root, tmp_path):
    """torchtitan v0.2.2 builds blocks in bfloat16 and the rest in float32."""
    mixed = {n: t if n.startswith("layers.") else t.float() for n, t in native(root / "dcp").items()}
    mixed |= {name: tensor.bfloat16() for name, tensor in mixed.items() if name.endswith("expert_bias")}
    torch.distributed.checkpoint.save(mixed, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    report = convert(tmp_path / "dcp", tmp_path / "hf", to="hf", model_from=root / "hf")
    assert report.dtypes.keys() == {"bfloat16", "float32"} and not report.missing
    found = read_folder(tmp_path / "hf")
    assert found["lm_head.weight"].dtype is torch.float32
    assert torch.equal(found["lm_head.weight"].bfloat16(), values_of(root / "mx")["lm_head.weight"])
    report = convert(tmp_path / "dcp", tmp_path / "mx", to="hf", model_from=root / "hf", options=MXFP4, dtype="bf16")
    kept = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    assert {n for n, t in read_folder(tmp_path / "mx").items() if t.dtype is torch.float32} == kept


def test_an_offset_of_experts_has_no_place(root, tmp_path):
    tensors = native(root / "dcp")
    tensors["layers.1.moe.expert_bias"][3] = 0.5
    torch.save(tensors, tmp_path / "model.pt")
    for options in (OutputOptions(), MXFP4):
        with pytest.raises(CheckpointError, match="not zero") as caught:
            convert(tmp_path / "model.pt", tmp_path / "x", to="hf", model_from=root / "hf", options=options)
        assert "layers.1.moe.expert_bias" in caught.value.message
    convert(tmp_path / "model.pt", tmp_path / "dcp", to="dcp", model_from=root / "hf")


def test_quantized_from_float32_as_from_its_bfloat16(root, tmp_path):
    write_gpt_oss(tmp_path / "f32", dtype="float32")
    report = convert(tmp_path / "f32", tmp_path / "mx", to="hf", options=MXFP4)
    found = read_folder(tmp_path / "mx")
    for name, tensor in read_folder(tmp_path / "f32").items():
        if name.endswith(MATRICES):
            blocks, scales = quantize(tensor.mT)
            assert torch.equal(found[f"{name}_blocks"], blocks) and torch.equal(found[f"{name}_scales"], scales)
        else:
            assert torch.equal(found[name], tensor)
    assert report.num_scales == sum(t.numel() for n, t in found.items() if n.endswith("_scales"))
    assert report.moved_scales is None
    config = json.loads((tmp_path / "mx/config.json").read_text())
    assert config["quantization_config"] == CONFIG
    described, plain = inspect_checkpoint(tmp_path / "mx"), inspect_checkpoint(tmp_path / "f32")
    assert verify(tmp_path / "mx").ok and described.num_parameters == plain.num_parameters
    assert described.quantization["method"] == "mxfp4" and described.quantization["codes"] == "e2m1"
    assert {"a window of 8 tokens in 2 of 3 layers", "attention sinks"} <= set(described.parts)


def test_torchao_s_rule(root, tmp_path):
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    convert(root / "hf", tmp_path / "mx", to="hf", options=OutputOptions(quantize="mxfp4:torchao"))
    found = read_folder(tmp_path / "mx")
    for name, tensor in read_folder(root / "hf").items():
        if name.endswith(MATRICES):
            scales, codes = to_mx(tensor.mT.contiguous(), torch.float4_e2m1fn_x2, 32)
            assert torch.equal(found[f"{name}_scales"], scales.view(torch.uint8))
            assert torch.equal(found[f"{name}_blocks"].flatten(-2), codes.view(torch.uint8))


def test_blocks_whose_bytes_differ_are_counted_and_stay_in_the_next_generation(root, tmp_path):
    held = read_folder(root / "mx")
    name = "model.layers.1.mlp.experts.down_proj"
    held[f"{name}_blocks"][3, 5, 1] &= 0xBB  # largest code 3 (1.5): the scale can be halved twice
    held[f"{name}_blocks"][4] &= 0xBB
    src, folders, moved = save(tmp_path / "0", held, root / "mx", CONFIG), [], []
    for number in (1, 2, 3):
        moved.append(convert(src, tmp_path / str(number), to="hf", options=MXFP4).moved_scales)
        src = tmp_path / str(number)
        folders.append(read_folder(src))
    differ = (folders[0][f"{name}_scales"] != held[f"{name}_scales"]).sum().item()
    assert moved == [differ, 0, 0] and differ == 1 + held[f"{name}_scales"][4].numel()
    assert_same(folders[1], folders[0])
    assert_same(folders[2], folders[0])
    assert_same(values_of(tmp_path / "1"), values_of(tmp_path / "0"))
    assert diff(tmp_path / "0", tmp_path / "1").equal


BLOCKS, SCALES = ("model.layers.1.mlp.experts.gate_up_proj" + end for end in ("_blocks", "_scales"))
BROKEN = {
    "no scales": ("missing", SCALES),
    "no codes": ("scales", f"{SCALES}  there is no {BLOCKS}"),
    "rows of scales": ("shape", f"{SCALES}  is [12, 191, 2], should be [12, 192, 2]"),
    "codes": ("shape", f"{BLOCKS}  is [12, 192, 2, 8], should be [..., 16]"),
    "floating scales": ("dtype", f"{SCALES}  is float32, should be uint8"),
    "signed codes": ("dtype", f"{BLOCKS}  is int8, should be uint8"),
    "one too many": ("scales", "layers.1.self_attn.q_proj_scales  there is no model.layers.1.self_attn.q_proj_blocks"),
    "one in bfloat16": ("dtype", f"{BLOCKS}  is bfloat16, other experts are mxfp4"),
    "attention": ("unexpected", "model.layers.0.self_attn.q_proj_blocks"),
    "excluded": ("config", f"{BLOCKS}  is mxfp4, and quantization_config lists its module as not quantized"),
    "not quantized": ("config", "none is: remove it if they no longer are"),
    "no config": ("dtype", f"{BLOCKS}  is uint8, should be a floating type"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_codes_and_scales_that_do_not_match_are_listed(root, tmp_path, kind):
    held, config = read_folder(root / "mx"), CONFIG
    match kind:
        case "no scales":
            del held[SCALES]
        case "no codes":
            del held[BLOCKS]
        case "rows of scales":
            held[SCALES] = held[SCALES][:, 1:].contiguous()
        case "codes":
            held[BLOCKS] = held[BLOCKS][..., :8].contiguous()
        case "floating scales":
            held[SCALES] = held[SCALES].float()
        case "signed codes":
            held[BLOCKS] = held[BLOCKS].view(torch.int8)
        case "one too many":
            held["model.layers.1.self_attn.q_proj_scales"] = held[SCALES].clone()
        case "one in bfloat16":
            held[BLOCKS] = dequantize(held[BLOCKS], held.pop(SCALES))
        case "attention":
            held["model.layers.0.self_attn.q_proj_blocks"] = held[BLOCKS].clone()
            held["model.layers.0.self_attn.q_proj_scales"] = held[SCALES].clone()
        case "excluded":
            config = CONFIG | {"modules_to_not_convert": ["model.layers.1"]}
        case "not quantized":
            held = read_folder(root / "hf")
        case "no config":
            config = None
    src = save(tmp_path / "src", held, root / "hf", config)
    with pytest.raises(CheckpointError) as caught:
        convert(src, tmp_path / "x", to="dcp")
    what, text = BROKEN[kind]
    assert any(what in line and text in line for line in caught.value.message.splitlines()), caught.value.message
    assert not (tmp_path / "x").exists() and not verify(src).ok


def test_scales_of_255_are_refused_with_all_offenders(root, tmp_path):
    held = read_folder(root / "mx")
    held[SCALES][0, 0, 0] = held[SCALES][1, 5, 1] = 255
    held[SCALES.replace(".1.", ".2.")][0, 0, 0] = 255
    src = save(tmp_path / "src", held, root / "mx", CONFIG)
    with pytest.raises(CheckpointError, match="NaN or infinite") as caught:
        convert(src, tmp_path / "x", to="dcp")
    found = caught.value.message
    assert "layers.1.moe.experts.mlp1_weight: 64" in found and "layers.2.moe.experts.mlp1_weight: 32" in found
    assert not (tmp_path / "x").exists()
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        convert(src, tmp_path / "x", to="hf", options=MXFP4)


def test_what_cannot_be_asked_for(root, tmp_path):
    from tests.models.dense import write as write_tiny

    write_tiny(tmp_path / "qwen", "qwen3")
    write_gpt_oss(tmp_path / "odd", hidden_size=48, num_hidden_layers=1)
    refused = {
        "no gpt_oss models are published so": lambda x: convert(
            root / "dcp", x, to="hf", options=OutputOptions(quantize="fp8")
        ),
        "no qwen3 models are published so": lambda x: convert(tmp_path / "qwen", x, to="hf", options=MXFP4),
        "has no qwen3 models": lambda x: convert(tmp_path / "qwen", x, to="openai"),
        "reads experts in mxfp4": lambda x: convert(
            root / "dcp", x, to="openai", options=OutputOptions(quantize="fp8")
        ),
        "which do not divide": lambda x: convert(tmp_path / "odd", x, to="hf", options=MXFP4),
        "cannot be quantized": lambda x: convert(root / "dcp", x, to="openai", allow_nonfinite=True),
        "one form only": lambda x: convert(root / "dcp", x, to="hf", options=OutputOptions(fused_experts=True)),
    }
    for text, ask in refused.items():
        with pytest.raises(TitanError, match=text):
            ask(tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("flavor", FLAVORS)
def test_config_of_every_flavor_there_and_back(flavor):
    args = FLAVORS[flavor]
    family, found = read_hf_config(config_of(args))
    assert family.name == "gpt_oss" and found == args
    if flavor != "debug_window":  # lengths of one factor
        assert read_hf_config(release_config(args))[1] == args


@pytest.mark.parametrize("window", [0, -5, 8.5, True])
def test_a_window_of_no_tokens_is_refused_by_its_own_name(window):
    with pytest.raises(UnsupportedError, match=f"sliding_window = {window}: expected a whole number of tokens"):
        read_hf_config(config_of(FLAVORS["20b"]) | {"sliding_window": window})


@pytest.mark.parametrize(("flavor", "num_layers", "num_experts"), [("20b", 24, 32), ("120b", 36, 128)])
def test_hugging_face_s_config_of_the_published_models(flavor, num_layers, num_experts):
    """Typed from the releases."""
    published = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": num_layers, "num_key_value_heads": 8,
        "num_local_experts": num_experts, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": CONFIG, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
    }  # fmt: skip
    assert read_hf_config(published)[1] == FLAVORS[flavor]
    assert read_quantization(published) == Mxfp4Scheme()
    written = config_of(FLAVORS[flavor])
    restated = {"router_aux_loss_coef", "rope_scaling"}  # the first is the class's, the second leaves out its defaults
    for key in published.keys() & written.keys() - restated:
        assert written[key] == published[key], key


@pytest.mark.parametrize("value", [None, "4096", -1, 0, True, float("nan"), [4]])
@pytest.mark.parametrize("key", RELEASE)
def test_openai_s_config_has_numbers(key, value):
    with pytest.raises(CheckpointError, match=f"{key} = "):
        from_release(release_config(FLAVORS["20b"]) | {key: value})


def test_openai_s_form_and_hugging_face_s_are_told_apart(root, tmp_path):
    release = tmp_path / "openai"
    convert(root / "dcp", release, to="openai")
    for place, named, other in ((root / "mx", "openai", "hf"), (release, "hf", "openai")):
        with pytest.raises(CheckpointError, match=f"is .*, not {get_format(named).called}") as caught:
            convert(place, tmp_path / "out", to="dcp", source=named)
        assert list(caught.value.tries) == [f"titan convert {other}-to-dcp {place} {tmp_path / 'out'}"]
        convert(place, tmp_path / f"from {other}", to="dcp", source=other)


def test_openai_s_config_of_the_published_20b():
    """Typed from the release."""
    release = {
        "num_hidden_layers": 24, "num_experts": 32, "experts_per_token": 4, "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "swiglu_limit": 7.0, "head_dim": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "sliding_window": 128, "initial_context_length": 4096, "rope_theta": 150000,
        "rope_scaling_factor": 32.0, "rope_ntk_alpha": 1, "rope_ntk_beta": 32,
    }  # fmt: skip
    assert read_hf_config(release)[1] == FLAVORS["20b"]
    assert release_config(FLAVORS["20b"]) == release
    with pytest.raises(UnsupportedError, match="swiglu_alpha"):
        from_release(release | {"swiglu_alpha": 1.7})
    with pytest.raises(UnsupportedError) as caught:
        release_config(
            read_hf_config(config_of(FLAVORS["20b"]) | {"rms_norm_eps": 1e-6, "tie_word_embeddings": True})[1]
        )
    assert "norm_eps: 1e-06" in caught.value.message and "tied: True" in caught.value.message


def test_training_starts_from_mxfp4_where_it_is_asked_to(root):
    asked = {"initial_load_in_hf": True, "initial_load_in_hf_quantized": True}
    with open_native(root / "mx", dequantized="float32") as weights:
        refuse_other_form(weights, root / "mx", Checkpoint(**asked))
        fqn = "layers.1.moe.experts.mlp1_weight"
        assert weights.tensors[fqn].dtype == "float32"
        expected = values_of(root / "mx")["model.layers.1.mlp.experts.gate_up_proj"].mT.float()
        assert torch.equal(torch.from_numpy(weights.read(fqn)), expected)
        for given in ({}, asked | {"initial_load_in_hf_quantized": False}):
            with pytest.raises(CheckpointError, match="holds 6 weights in mxfp4"):
                refuse_other_form(weights, root / "mx", Checkpoint(**given))
