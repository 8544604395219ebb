"""Llama 4 in every format: text and multimodal folders of transformers, Meta's shards, DCP; values against torch's."""

import io
import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Llama4ForConditionalGeneration

from converters.common.errors import CheckpointError, ConfigError, UnsupportedError
from converters.containers.torch_file import read_catalog
from converters.conversion.completed import completed
from converters.diff import diff
from converters.engine.journal import reading_order
from converters.engine.read import CatalogReader
from converters.families import registry
from converters.families.registry import get_family
from converters.formats.base import OutputOptions
from converters.inspect import inspect_checkpoint
from converters.layout.mesh_shape import MeshShape
from converters.model.multimodal import EXTRA_REASON
from converters.source.open import open_checkpoint
from converters.source.weights import native_weights, open_native
from converters.store.folder import FolderStore
from converters.verify import verify
from converters.views.catalog import Value
from tests.doors import convert, reshard
from tests.fp8_folders import read_folder
from tests.models.llama4 import PROCESSOR, meta_params, meta_shards, native_logits, text_state, write_meta
from tests.models.llama4 import write as write_llama4
from tests.models.names import native_arrays
from tests.unit.converters import evil
from tests.unit.converters.samples import assert_same

FAMILY = get_family("llama4")
TOKENS = torch.randint(0, 128, (30,), generator=torch.Generator().manual_seed(1))
FORMS = {
    "dcp": ("dcp", OutputOptions()),
    "dcp for a mesh": ("dcp", OutputOptions(mesh=MeshShape(pp=2, dp_shard=5))),
    "torch": ("torch", OutputOptions()),
    "hf": ("hf", OutputOptions(shard_bytes=30_000)),
}


@pytest.fixture(scope="module", params=["maverick", pytest.param("scout", marks=pytest.mark.slow)])
def source(request, tmp_path_factory):
    """(name, model, root): root/hf, a text folder that transformers wrote, and root/dcp."""
    root = tmp_path_factory.mktemp(request.param)
    model = write_llama4(root / "hf", request.param)
    convert(root / "hf", root / "dcp", to="dcp")
    return request.param, model, root


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(model, root): root/hf, a multimodal folder that transformers wrote, and root/dcp with all of it."""
    root = tmp_path_factory.mktemp("multimodal")
    model = write_llama4(root / "hf", "maverick", multimodal=True, dtype="bfloat16")
    convert(root / "hf", root / "dcp", to="dcp", keep_extra=True)
    return model, root


def loaded(folder, model):
    """The native weights, as stock torch loads them."""
    state = {name: torch.full(array.shape, torch.nan) for name, array in native_arrays(model).items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_logits_by_the_published_formulas_are_those_of_the_class(source):
    _, model, root = source
    with torch.no_grad(), open_native(root / "dcp") as weights:
        theirs = model.double()(TOKENS[None]).logits[0]
        ours = native_logits({fqn: weights.read(fqn) for fqn in weights.tensors}, TOKENS, weights.info.args)
    model.float()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("to", ["dcp", "meta"])
def test_config_there_and_back(source, to, tmp_path):
    _, _, root = source
    convert(root / "hf", tmp_path / "out", to=to)
    convert(tmp_path / "out", tmp_path / "hf", to="hf")
    ours, theirs = (AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path / "hf", root / "hf"))
    assert {k: v for k, v in ours.items() if v != theirs[k]}.keys() <= {"_name_or_path"}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_metas_shards(source, count, tmp_path):
    """Read: the values of transformers. Written: the tensors of the release, bit for bit, in each of its files."""
    _, model, root = source
    write_meta(tmp_path / "release", model, count)
    report = convert(tmp_path / "release", tmp_path / "hf", to="hf")
    assert_same(read_folder(tmp_path / "hf"), read_folder(root / "hf"))
    dropped = {name.split(".")[-1] for name in report.dropped}
    statistics = {"expert_activation_DE", "global_gate_stats_3E", "running_gate_stats_3E"}
    assert dropped == statistics | {"freqs", "_extra_state", "class_embedding", "weight"}  # the last two: of vision
    assert any("_extra_state of 6 modules is not read" in remark for remark in report.remarks)
    assert any(r.startswith("2 tensors of encoders of other media (vision_embeddings,") for r in report.remarks)
    options = OutputOptions(num_shards=count)
    convert(root / "dcp", tmp_path / "written", to="meta", options=options)
    for rank, expected in enumerate(meta_shards(model, count)):
        file = f"consolidated.{rank:02}.pth"
        found = torch.load(tmp_path / "written" / file, weights_only=True)
        expected = {n: t for n, t in expected.items() if torch.is_tensor(t) and n.split(".")[-1] not in statistics}
        expected = {n: t for n, t in expected.items() if not n.startswith(("vision", "rope")) and "_extra_" not in n}
        assert_same(found, expected)
    assert diff(tmp_path / "written", tmp_path / "release").equal
    for file in ("titan_model.json", "titan_manifest.json"):  # params.json alone
        (tmp_path / "written" / file).unlink()
    assert diff(tmp_path / "written", root / "hf").equal


def test_verify_finds_a_flipped_bit_in_what_is_dropped(source, tmp_path):
    """Also in the parts that further shards have of the vision encoder and of experts' statistics."""
    write_meta(tmp_path / "release", source[1], 2)
    catalog, num_found = open_checkpoint(tmp_path / "release"), 0
    for fqn in catalog.of_ranks:
        for chunk in (chunks := catalog.all_chunks(fqn)):
            path = tmp_path / "release" / chunk.file
            kept = path.read_bytes()
            spoilt = bytearray(kept)
            spoilt[chunk.byte_offset] ^= 16
            path.write_bytes(spoilt)
            (failed,) = (check for check in verify(tmp_path / "release").checks if check.outcome == "failed")
            assert any(fqn in problem and chunk.file in problem for problem in failed.problems)
            path.write_bytes(kept)
        num_found += len(chunks)
    assert "vision_projection.weight" in catalog.of_ranks and num_found == 2 * len(catalog.of_ranks)
    assert verify(tmp_path / "release").ok


def test_what_every_shard_needs_alike_is_compared(source, tmp_path):
    """Other than what is dropped as each rank's own: that may differ, or be in one file alone."""
    _, model, root = source
    write_meta(tmp_path / "release", model, 2)
    file = tmp_path / "release/consolidated.01.pth"
    state = torch.load(file, weights_only=False)
    state["vision_embeddings.of_this_rank"] = torch.ones(3)
    torch.save(state, file)
    report = convert(tmp_path / "release", tmp_path / "dcp", to="dcp")
    assert "vision_embeddings.of_this_rank" in report.dropped and diff(tmp_path / "dcp", root / "dcp").equal
    assert verify(tmp_path / "release").ok
    state["layers.2.attention.wqkv.layer_norm_weight"][0] += 1
    state["rope.freqs"] = torch.zeros(4)
    torch.save(state, file)
    with pytest.raises(CheckpointError, match="that must be equal in all of them") as error:
        convert(tmp_path / "release", tmp_path / "out", to="dcp")
    assert error.value.message.count("consolidated.01.pth") == 2


def test_shards_of_zeros_are_no_doubles(source, tmp_path):
    """Parts of a fused weight begin at different places of one record. A real double is one all the same."""
    _, model, _ = source
    write_meta(tmp_path / "release", model, 2)
    first, second = (tmp_path / f"release/consolidated.{rank:02}.pth" for rank in range(2))
    content = io.BytesIO()  # without a name, which would tell
    torch.save(torch.load(first, weights_only=False), content)
    second.write_bytes(content.getvalue())
    with pytest.raises(CheckpointError, match="a shard is repeated"):
        convert(tmp_path / "release", tmp_path / "out", to="dcp")
    for file in (first, second):
        state = torch.load(file, weights_only=False)
        torch.save({n: torch.zeros_like(t) if torch.is_tensor(t) else t for n, t in state.items()}, file)
    assert convert(tmp_path / "release", tmp_path / "out", to="dcp").num_tensors


@pytest.mark.parametrize("data", [b"", b"\x80some bytes"])
def test_states_of_kernels_are_bytes(data, tmp_path):
    torch.save({"a._extra_state": io.BytesIO(data), "a": torch.ones(2)}, tmp_path / "file.pth")
    assert read_catalog(FolderStore(tmp_path), "file.pth").values == {"a._extra_state": Value(data)}


def test_a_stream_without_a_state_is_empty(tmp_path):
    stream = b"\x80\x02}X\x01\x00\x00\x00ac_io\nBytesIO\n)Rs."  # {"a": _io.BytesIO()}
    assert pickle.loads(stream)["a"].getvalue() == b""
    (tmp_path / "file.pth").write_bytes(evil.torch_zip(stream))
    assert read_catalog(FolderStore(tmp_path), "file.pth").values == {"a": Value(b"")}


def test_renamed_experts_of_a_release_are_seen(source, tmp_path):
    """Gate and up exchanged: the values differ, and the comparison says how."""
    _, model, root = source
    write_meta(tmp_path / "release", model)
    file = tmp_path / "release/consolidated.00.pth"
    state = torch.load(file, weights_only=False)
    one, other = (f"layers.3.feed_forward.experts.{name}" for name in ("moe_w_in_eD_F", "moe_w_swiglu_eD_F"))
    state[one], state[other] = state[other], state[one]
    torch.save(state, file)
    found = diff(tmp_path / "release", root / "dcp")
    assert {d.name for d in found.differences} == {"layers.3.moe.experts.w1", "layers.3.moe.experts.w3"}
    assert all("gate and up are swapped" in d.detail for d in found.differences)


def test_matrices_that_are_not_transposed_are_seen(tmp_path):
    """Of square experts no shape tells; the comparison does."""
    write_llama4(tmp_path / "hf", "square")
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    name = "model.layers.1.feed_forward.experts.down_proj"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    (found,) = diff(tmp_path / "hf", tmp_path / "dcp").differences
    assert found.name == "layers.1.moe.experts.w2" and "equal after a transpose" in found.detail


def test_a_text_model_is_what_is_left_of_a_multimodal_one(whole, tmp_path):
    model, root = whole
    report = convert(root / "hf", tmp_path / "dcp", to="dcp")
    extras = {name for name, reason in report.dropped.items() if reason == EXTRA_REASON}
    assert extras == {n for n in read_folder(root / "hf") if not n.startswith("language_model.")}
    assert any(f"{len(extras)} tensors of encoders of other media" in remark for remark in report.remarks)
    assert any("preprocessor_config.json" in remark for remark in report.remarks)
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    assert_same(read_folder(tmp_path / "hf"), text_state(model))
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).eval()
    assert type(text).__name__ == "Llama4ForCausalLM"
    assert not set(PROCESSOR) & {path.name for path in (tmp_path / "hf").iterdir()}
    with torch.no_grad():
        assert torch.equal(text(TOKENS[None]).logits, model(TOKENS[None]).logits)


@pytest.mark.parametrize("form", ["dcp", "dcp for a mesh", "torch", "hf"])
def test_a_multimodal_checkpoint_is_complete_again(whole, form, tmp_path):
    model, root = whole
    to, options = FORMS[form]
    convert(root / "hf", tmp_path / "out", to=to, options=options, keep_extra=True)
    assert verify(tmp_path / "out").ok
    convert(tmp_path / "out", tmp_path / "hf", to="hf", keep_extra=True if to == "hf" else None)
    assert_same(read_folder(tmp_path / "hf"), read_folder(root / "hf"))
    ours, theirs = (AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path / "hf", root / "hf"))
    assert {k for k, v in ours.items() if v != theirs[k]} <= {"_name_or_path"}
    for file, content in PROCESSOR.items():
        assert json.loads((tmp_path / "hf" / file).read_text()) == content
    if form == "dcp":
        again = Llama4ForConditionalGeneration.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).eval()
        with torch.no_grad():
            assert torch.equal(again(TOKENS[None]).logits, model(TOKENS[None]).logits)


def test_what_is_beside_the_text_model_is_not_part_of_it(whole, tmp_path):
    model, root = whole
    extras = {
        name: tensor for name, tensor in read_folder(root / "hf").items() if not name.startswith("language_model.")
    }
    reshard(root / "dcp", tmp_path / "for a mesh", mesh=MeshShape(dp_shard=2))
    held = open_checkpoint(tmp_path / "for a mesh").tensors.items()
    files = {name: {chunk.file for chunk in entry.chunks} for name, entry in held}
    assert {name for name, its in files.items() if its == {"__extra_0.distcp"}} == extras.keys()
    reshard(root / "dcp", tmp_path / "in files", shard_bytes=60_000)
    assert all(path.stat().st_size < 80_000 for path in (tmp_path / "in files").glob("*.distcp"))
    state = {name: torch.empty_like(tensor) for name, tensor in extras.items()}
    dcp.load(state, checkpoint_id=root / "dcp", no_dist=True)  # stock torch
    assert_same(state, extras)
    with open_native(root / "dcp") as weights:
        assert not weights.extras and weights.tensors.keys() == native_arrays(model).keys()
        assert not weights.info.outer and not set(PROCESSOR) & weights.info.assets.keys()  # a text model's, for exports
    reshard(root / "dcp", tmp_path / "resharded", mesh=MeshShape(dp_shard=2))
    compared = diff(tmp_path / "resharded", root / "dcp")
    assert compared.equal and compared.num_equal == len(extras) + len(native_arrays(model))
    with_text = convert(root / "dcp", tmp_path / "text", to="dcp", keep_extra=False)
    assert with_text.num_tensors == len(native_arrays(model))
    assert diff(tmp_path / "text", root / "hf").not_compared == dict.fromkeys(
        ("multi_modal_projector", "vision_model"), "only in B"
    )
    assert f"{len(extras)} tensors beside the text model" in inspect_checkpoint(root / "dcp").parts
    meta = convert(root / "dcp", tmp_path / "meta", to="meta")
    assert set(extras) <= meta.dropped.keys() and diff(tmp_path / "meta", tmp_path / "text").equal
    left = ", ".join(f"assets/{file}" for file in PROCESSOR)
    assert f"files that are not copied: {left}" in meta.remarks and not set(PROCESSOR) & set(meta.other_files)
    assert "multimodal" not in json.loads((tmp_path / "meta/titan_model.json").read_text())
    assert not set(PROCESSOR) & {path.name for path in (tmp_path / "meta").iterdir()}
    (counted,) = [remark for remark in meta.remarks if "encoders of other media" in remark]
    assert counted.startswith(f"{len(extras)} tensors") and counted.endswith(
        "for which an original Meta release has no place"
    )
    with pytest.raises(ConfigError, match=f"--keep-extra: .* has no place for the {len(extras)} tensors"):
        convert(root / "dcp", tmp_path / "none", to="meta", keep_extra=True)
    with pytest.raises(ConfigError, match="--keep-extra: .* has no place"):
        convert(root / "hf", tmp_path / "none", to="meta", keep_extra=True)
    assert not (tmp_path / "none").exists()


def test_training_and_inference_note_what_they_do_not_read(whole, tmp_path):
    model, root = whole
    write_meta(tmp_path / "meta", model, 2)
    text = "tensors of encoders of other media (multi_modal_projector, vision_model; 0.00 GB)"
    num_extras = sum(not name.startswith("language_model.") for name in read_folder(root / "hf"))
    of_meta = "2 tensors of encoders of other media (vision_embeddings, vision_projection)"
    for folder, said in (
        (root / "hf", f"{num_extras} {text}"),
        (root / "dcp", f"{num_extras} {text}"),
        (tmp_path / "meta", of_meta),
    ):
        with open_native(folder) as weights:  # both log these notes
            assert weights.notes[-1] == f"{said} are not read: the text model computes without them"
    convert(root / "dcp", tmp_path / "text", to="dcp", keep_extra=False)
    with open_native(tmp_path / "text") as weights:
        assert weights.notes == []


def test_other_values_beside_the_text_model_are_a_difference(whole, tmp_path):
    _, root = whole
    shutil.copytree(root / "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["vision_model.class_embedding"][3] += 1
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    assert [d.name for d in diff(tmp_path / "hf", root / "dcp").differences] == ["vision_model.class_embedding"]


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
def test_a_trained_text_model_is_completed_by_the_checkpoint_that_it_began_as(whole, to, tmp_path):
    model, root = whole
    convert(root / "dcp", tmp_path / "text", to="dcp", keep_extra=False)  # as a checkpoint of a run
    given = {"model_from": root / "hf", "keep_extra": True}
    report = convert(tmp_path / "text", tmp_path / "out", to=to, **given)
    assert verify(tmp_path / "out").ok and diff(tmp_path / "out", root / "dcp").equal
    convert(tmp_path / "out", tmp_path / "hf", to="hf", keep_extra=True)
    assert_same(read_folder(tmp_path / "hf"), read_folder(root / "hf"))
    again = Llama4ForConditionalGeneration.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        assert torch.equal(again(TOKENS[None]).logits, model(TOKENS[None]).logits)
    for file, content in PROCESSOR.items():
        assert json.loads((tmp_path / "hf" / file).read_text()) == content
    alone = convert(tmp_path / "text", tmp_path / "alone", to="hf", model_from=root / "hf")
    assert not set(PROCESSOR) & {path.name for path in (tmp_path / "alone").iterdir()}
    num_extras = sum(not name.startswith("language_model.") for name in read_folder(root / "hf"))
    assert any(r.startswith(f"{num_extras} tensors of") and r.endswith(f"from {root / 'hf'}") for r in report.remarks)
    assert report.num_tensors == alone.num_tensors + num_extras or to != "hf"
    with pytest.raises(ConfigError, match="has no place for the"):
        convert(tmp_path / "text", tmp_path / "meta", to="meta", **given)


def test_only_a_checkpoint_of_the_same_model_completes_another(source, whole, tmp_path):
    name, _, root = source
    with pytest.raises(ConfigError, match="holds only a text model") as caught:
        convert(root / "dcp", tmp_path / "out", to="hf", model_from=root / "hf", keep_extra=True)
    assert caught.value.hint.endswith("in --model-from")
    if name != "maverick":
        with pytest.raises(ConfigError, match="contradicts"):
            convert(root / "dcp", tmp_path / "out", to="hf", model_from=whole[1] / "hf", keep_extra=True)
    assert not (tmp_path / "out").exists()


def test_what_a_model_is_completed_by_is_not_replaced(whole, tmp_path):
    _, root = whole
    convert(root / "dcp", tmp_path / "text", to="dcp", keep_extra=False)
    shutil.copytree(root / "hf", tmp_path / "hf")
    given = {"model_from": tmp_path / "hf", "keep_extra": True, "overwrite": True}
    for out in ("hf", "hf/inner"):
        with pytest.raises(CheckpointError, match="is the source itself|is inside the other"):
            convert(tmp_path / "text", tmp_path / out, to="hf", **given)
    assert_same(read_folder(tmp_path / "hf"), read_folder(root / "hf"))
    with pytest.raises(ConfigError, match="is a file"):
        convert(tmp_path / "text", tmp_path / "out", to="hf", keep_extra=True, model_from=tmp_path / "hf/config.json")


PARTS = ("vision_model", "multi_modal_projector", "vision_config", "vision_model.model.layers.1.mlp.fc1.weight")


@pytest.mark.parametrize("part", PARTS)
def test_half_of_what_is_beside_the_text_model_is_not_kept(whole, part, tmp_path):
    _, root = whole
    shutil.copytree(root / "hf", tmp_path / "hf")
    tensors = read_folder(root / "hf")
    layer = {name: t for name, t in tensors.items() if name.startswith("vision_model.model.layers.0.")}
    tensors |= {name.replace("layers.0.", "layers.1."): tensor.clone() for name, tensor in layer.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(part)}
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({key: v for key, v in config.items() if key != part}))
    convert(root / "dcp", tmp_path / "text", to="dcp", keep_extra=False)
    with pytest.raises(ConfigError, match=f"lacks parts of a Llama4ForConditionalGeneration:\n.*{part}"):
        convert(tmp_path / "hf", tmp_path / "out", to="dcp", keep_extra=True)
    with pytest.raises(ConfigError, match=f"lacks parts of a Llama4ForConditionalGeneration:\n.*{part}"):
        convert(tmp_path / "text", tmp_path / "out", to="hf", keep_extra=True, model_from=tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "text again", to="dcp")


def test_a_plan_of_two_checkpoints_is_that_of_both(whole, tmp_path):
    """Nothing that was interrupted is resumed with another vision encoder."""
    _, root = whole
    convert(root / "dcp", tmp_path / "text", to="dcp", keep_extra=False)
    shutil.copytree(root / "hf", tmp_path / "hf")
    seen = []
    for _ in range(2):
        with native_weights(open_checkpoint(tmp_path / "text")) as text, completed(text, tmp_path / "hf") as both:
            seen.append(reading_order(both.source))
        os.utime(tmp_path / "hf/model.safetensors", ns=(1, 1))
    assert seen[0] != seen[1]


def test_damage_of_what_completes_a_model_is_found(whole, tmp_path):
    _, root = whole
    convert(root / "dcp", tmp_path / "text", to="dcp", keep_extra=False)
    shutil.copytree(root / "dcp", tmp_path / "damaged")
    name, catalog = "vision_model.class_embedding", open_checkpoint(root / "dcp")
    with CatalogReader(catalog) as reader:
        chunk = reader.located(name, catalog.tensors[name].chunks[0])
    with (tmp_path / "damaged" / chunk.file).open("r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(b"\x01")
    with pytest.raises(CheckpointError, match="vision_model.class_embedding"):
        convert(tmp_path / "text", tmp_path / "out", to="hf", model_from=tmp_path / "damaged", keep_extra=True)
    assert not (tmp_path / "out").exists()


def test_nothing_to_keep(source, whole, tmp_path):
    _, _, root = source
    with pytest.raises(ConfigError, match="holds only a text model"):
        convert(root / "hf", tmp_path / "out", to="dcp", keep_extra=True)
    shutil.copytree(whole[1] / "hf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config["text_config"]))
    with pytest.raises(ConfigError, match="no config.json of Llama4ForConditionalGeneration"):
        convert(tmp_path / "hf", tmp_path / "out", to="dcp", keep_extra=True)
    assert diff(tmp_path / "hf", whole[1] / "dcp").num_equal  # the text model is described all the same


def test_options_that_the_family_has_not(source, tmp_path):
    _, _, root = source
    with pytest.raises(ConfigError, match="--num-shards 8"):
        convert(root / "dcp", tmp_path / "out", to="meta", options=OutputOptions(num_shards=8))
    with pytest.raises(ConfigError, match="--fused-experts"):
        convert(root / "dcp", tmp_path / "out", to="hf", options=OutputOptions(fused_experts=True))
    for quantize in ("fp8", "mxfp4"):
        with pytest.raises(ConfigError, match="no llama4 models are published so") as caught:
            convert(root / "dcp", tmp_path / "out", to="hf", options=OutputOptions(quantize=quantize))
        assert (caught.value.hint, list(caught.value.tries)) == ("leave it out", [])


def test_stacked_experts_have_no_fp8_form(source, tmp_path, monkeypatch):
    """For a family of one's own that does not say how its models are published."""
    own = replace(FAMILY, quantized_as=("fp8",))
    monkeypatch.setattr(registry, "_FAMILIES", {**registry.all_families(), "llama4": own})
    with pytest.raises(UnsupportedError, match="experts of a layer as one tensor"):
        convert(source[2] / "dcp", tmp_path / "out", to="hf", options=OutputOptions(quantize="fp8"))


@pytest.mark.parametrize("to", ["hf", "meta"])
def test_trained_offsets_of_experts_are_left_out_as_asked(source, to, tmp_path):
    _, model, root = source
    weights = loaded(root / "dcp", model)
    for name in (name for name in weights if name.endswith("expert_bias")):
        weights[name] += 0.01
    torch.save(weights, tmp_path / "trained.pt")
    with pytest.raises(CheckpointError, match="has no place for these, and they are not zero") as caught:
        convert(tmp_path / "trained.pt", tmp_path / "out", to=to, model_from=root / "hf")
    assert list(caught.value.tries) == ["--drop-expert-bias"]
    dropping = OutputOptions(drop_expert_bias=True)
    convert(tmp_path / "trained.pt", tmp_path / "out", to=to, model_from=root / "hf", options=dropping)
    convert(tmp_path / "out", tmp_path / "again", to="hf")
    assert_same(read_folder(tmp_path / "again"), read_folder(root / "hf"))


@pytest.mark.parametrize("count", [1, 2])
def test_quantized_releases_are_refused(source, count, tmp_path):
    """Also where the shards differ in what each rank has of its own."""
    _, model, _ = source
    write_meta(tmp_path / "release", model, count)
    last = tmp_path / f"release/consolidated.{count - 1:02}.pth"
    tensors = torch.load(last, weights_only=False)
    torch.save(tensors | {"layers.0.attention.wo._extra_state": torch.zeros(count, dtype=torch.uint8)}, last)
    params = meta_params(model) | {"quantization_args": {"scheme": "int4_weight_int8_dynamic_activation"}}
    (tmp_path / "release/params.json").write_text(json.dumps(params))
    with pytest.raises(UnsupportedError, match="quantization_args"):
        convert(tmp_path / "release", tmp_path / "out", to="dcp")


def test_experts_in_another_form_are_listed(source, tmp_path):
    _, _, root = source
    shutil.copytree(root / "hf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"num_local_experts": 6}))
    with pytest.raises(CheckpointError, match=r"gate_up_proj  is \[12, 64, "):
        convert(tmp_path / "hf", tmp_path / "out", to="dcp")
