"""converters/convert.py against transformers, stock dcp.load and torch.save; there and back; what is refused."""

import base64
import json
import shutil
import tracemalloc
from dataclasses import asdict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from converters.common.errors import CheckpointError, ConfigError, UnsupportedError
from converters.families.llama3 import LLAMA3
from converters.formats.base import OutputOptions
from converters.layout.layout import local_box
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import read_model_info, write_model_info
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from tests.doors import convert
from tests.models.llama import write as write_llama
from tests.models.names import interleaved, native_name
from tests.unit.converters.samples import assert_same
from tests.uploaded import STORES, in_store


@pytest.fixture(autouse=True, params=STORES)
def store(request, monkeypatch):
    in_store(request, monkeypatch, writes=["convert"])


HEADS, KV_HEADS = 4, 2


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def source(request, tmp_path_factory):
    """A folder that transformers wrote, and the model in it."""
    folder = tmp_path_factory.mktemp("hf")
    return folder, write_llama(folder, vocab_size=302, tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, vocab_size=302)
    return folder


def by_hand(state):
    """Native names and rows of transformers' Llama state dict, spelled out once more, without our tables."""
    native = {}
    for name, value in state.items():
        if "q_proj" in name or "k_proj" in name:
            value = interleaved(value, HEADS if "q_proj" in name else KV_HEADS)
        native[native_name(name)] = value.contiguous()
    return native


def expected_of(model):
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return by_hand(state)


def load_stock(folder, like):
    loaded = {name: torch.full_like(value, torch.nan) for name, value in like.items()}
    dcp.load(loaded, checkpoint_id=str(folder), no_dist=True)
    return loaded


def files_in(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("mesh", [None, MeshShape(pp=2, dp_shard=3, tp=2)], ids=str)
def test_hf_to_dcp_loads_with_stock_torch(source, mesh, tmp_path):
    folder, model = source
    before = files_in(folder)
    report = convert(folder, tmp_path / "dcp", to="dcp", source="hf", options=OutputOptions(mesh=mesh))
    expected = expected_of(model)
    assert_same(load_stock(tmp_path / "dcp", expected), expected)
    assert FileSystemReader(str(tmp_path / "dcp")).read_metadata().state_dict_metadata.keys() == expected.keys()
    assert report.num_tensors == len(expected) and report.dtypes == {
        "float32": sum(t.nbytes for t in expected.values())
    }
    assert files_in(folder) == before


def test_dcp_is_cut_as_the_mesh_reads_it(hf, tmp_path):
    mesh = MeshShape(dp_shard=2, tp=2)
    convert(hf, tmp_path / "dcp", to="dcp", options=OutputOptions(mesh=mesh))
    args = read_model_info(tmp_path / "dcp").args
    listed = FileSystemReader(str(tmp_path / "dcp")).read_metadata().state_dict_metadata
    for parameter in LLAMA3.parameters(args):
        wanted = {local_box(parameter, mesh, rank) for rank in range(4)}
        found = {(tuple(c.offsets), tuple(c.sizes)) for c in listed[parameter.fqn].chunks}
        assert found == {(box.offsets, box.sizes) for box in wanted}


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000], ids=["one file", "many files"])
def test_back_to_hf_is_byte_identical(source, shard_bytes, tmp_path):
    folder, model = source
    convert(folder, tmp_path / "dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=3, tp=2)))
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf", source="dcp", options=OutputOptions(shard_bytes=shard_bytes))
    written = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        written |= load_file(file)
    assert_same(written, load_file(folder / "model.safetensors"))
    back = LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.randint(0, 258, (2, 40), generator=torch.Generator().manual_seed(1))
    far = torch.stack([torch.arange(40), torch.arange(40) * 6])  # where RoPE's scaling shows
    with torch.no_grad():
        assert torch.equal(back(tokens, position_ids=far).logits, model(tokens, position_ids=far).logits)


def test_hf_output_opens_untouched(source, tmp_path):
    folder, model = source
    convert(folder, tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    back = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    differing = {
        key: (value, back.config.to_dict()[key])
        for key, value in model.config.to_dict().items()
        if back.config.to_dict()[key] != value and key not in ("_name_or_path", "initializer_range", "dtype")
    }
    assert differing == {}
    old = AutoTokenizer.from_pretrained(folder)
    new = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert new.encode("Hello wörld<|end_of_text|>") == old.encode("Hello wörld<|end_of_text|>")
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == model.config.eos_token_id
    assert (tmp_path / "dcp" / "assets" / "tokenizer.json").is_file()


def test_generation_config_is_made_from_the_tokenizer(hf, tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    for file in hf.iterdir():
        if file.name != "generation_config.json":
            (source / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"bos_token_id": 1, "eos_token_id": 2})
    )  # the class's defaults
    convert(source, tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    for name in ("generation_config.json", "config.json"):
        written = json.loads((tmp_path / "hf" / name).read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (256, 257)


def test_digests_do_not_depend_on_format_or_layout(hf, tmp_path):
    convert(hf, tmp_path / "a", to="dcp")
    convert(tmp_path / "a", tmp_path / "b", to="dcp", options=OutputOptions(mesh=MeshShape(pp=2, dp_shard=5, tp=2)))
    convert(tmp_path / "b", tmp_path / "c", to="hf")
    with open_native(tmp_path / "c") as weights:
        stored = weights.source.ledger.used
    native = {name: tensor.digest for name, tensor in read_manifest(tmp_path / "a").tensors.items()}
    assert {n: t.digest for n, t in read_manifest(tmp_path / "b").tensors.items()} == native
    assert {n: read_manifest(tmp_path / "c").tensors[f].digest for n, (f,) in stored.items()} == native
    assert len(set(native.values())) == len([n for n in native if "norm" not in n]) + 1  # all norms are ones


def test_second_copy_of_a_tied_embedding_is_dropped_and_reported(tmp_path):
    write_llama(tmp_path / "hf", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    report = convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    assert "equal to the embedding" in report.dropped["lm_head.weight"]
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match="tied, but lm_head.weight differs from"):
        convert(tmp_path / "hf", tmp_path / "dcp2", to="dcp")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "hf"]


def write_meta(folder, model):
    """An original release: torch.save of native names, params.json with what Meta's has."""
    folder.mkdir()
    native = by_hand(model.state_dict())
    torch.save(native | {"rope.freqs": torch.ones(4)}, folder / "consolidated.00.pth")
    params = {
        "dim": 32, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "vocab_size": 301, "multiple_of": 2,
        "ffn_dim_multiplier": 1.06, "norm_eps": 1e-6, "rope_theta": 10000.0, "use_scaled_rope": True,
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    return native


def test_meta_release_to_dcp_and_on_to_hf(tmp_path):
    model = write_llama(tmp_path / "hf")
    native = write_meta(tmp_path / "meta", model)
    report = convert(tmp_path / "meta", tmp_path / "dcp", to="dcp", source="meta")
    assert_same(load_stock(tmp_path / "dcp", native), native)
    assert list(report.dropped) == ["rope.freqs"]
    args = read_model_info(tmp_path / "dcp").args
    assert (args.ffn_hidden, args.vocab_size, args.head_dim, args.rope_scaling.factor) == (90, 301, 8, 8.0)
    convert(tmp_path / "dcp", tmp_path / "hf2", to="hf")
    assert_same(load_file(tmp_path / "hf2" / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors"))


def test_a_lone_tiktoken_file_becomes_a_tokenizer_for_transformers(tmp_path):
    model = write_llama(tmp_path / "hf")
    write_meta(tmp_path / "meta", model)
    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "meta" / "tokenizer.model").write_text(ranks)
    convert(tmp_path / "meta", tmp_path / "dcp", to="dcp")
    report = convert(tmp_path / "dcp", tmp_path / "out", to="hf")
    assert {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "generation_config.json"} <= {
        *report.other_files
    }
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("aß") == [256, *"aß".encode()]
    config = GenerationConfig.from_pretrained(tmp_path / "out")
    assert config.bos_token_id == 256 and config.eos_token_id == tokenizer.convert_tokens_to_ids(
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    )


def test_torch_files_with_hf_names(hf, tmp_path):
    (tmp_path / "bin").mkdir()
    torch.save(load_file(hf / "model.safetensors"), tmp_path / "bin" / "pytorch_model.bin")
    shutil.copy(hf / "config.json", tmp_path / "bin")
    for src in ("bin", "bin/pytorch_model.bin"):
        convert(tmp_path / src, tmp_path / "dcp", to="dcp", source="hf", overwrite=True)
        expected = by_hand(load_file(hf / "model.safetensors"))
        assert_same(load_stock(tmp_path / "dcp", expected), expected)


def test_links_are_followed(hf, tmp_path):
    """Hugging Face's cache holds links into a folder of blobs."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    shutil.copytree(hf, snapshot.parent.parent / "blobs")
    for file in hf.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    convert(snapshot, tmp_path / "dcp", to="dcp")
    assert (tmp_path / "dcp" / "assets" / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    assert not any(p.is_symlink() for p in (tmp_path / "dcp").rglob("*"))


def test_a_failure_on_the_way_leaves_nothing(hf, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("converters.conversion.execute.write_manifest", fail)
    with pytest.raises(CheckpointError, match="cannot write .*dcp: No space left"):
        convert(hf, tmp_path / "dcp", to="dcp")
    assert list(tmp_path.iterdir()) == []


def test_training_checkpoint_gives_its_weights_only(hf, tmp_path):
    tensors = by_hand(load_file(hf / "model.safetensors"))
    extra = {"optimizer.state.norm.weight.exp_avg": torch.ones(32), "train_state.step": 7}
    dcp.save(tensors | extra, checkpoint_id=str(tmp_path / "step-7"), no_dist=True)
    write_model_info(tmp_path / "step-7", read_model_info(hf))
    report = convert(tmp_path / "step-7", tmp_path / "hf", to="hf", source="dcp")
    assert report.left_out == {"optimizer": 1, "train_state": 1}
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(hf / "model.safetensors"))


@pytest.mark.parametrize("layout", ["flat", "model. prefix", "qkv_linear"])
def test_torchtitan_checkpoints_need_only_model_from(hf, layout, tmp_path):
    tensors = by_hand(load_file(hf / "model.safetensors"))
    if layout == "model. prefix":
        tensors = {f"model.{n}": t for n, t in tensors.items()} | {"model.freqs_cis": torch.zeros(3)}
    elif layout == "qkv_linear":
        for old in list(tensors):
            new = old.replace("output.weight", "lm_head.weight")
            for w in "qkv":
                new = new.replace(f"attention.w{w}", f"attention.qkv_linear.w{w}")
            tensors[new] = tensors.pop(old)
    dcp.save(tensors, checkpoint_id=str(tmp_path / "titan"), no_dist=True)
    with pytest.raises(CheckpointError, match="describes the model") as error:
        convert(tmp_path / "titan", tmp_path / "out", to="hf")
    assert "--model-from" in error.value.tries[0]
    convert(tmp_path / "titan", tmp_path / "out", to="hf", model_from=hf)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), load_file(hf / "model.safetensors"))
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_cast_is_torch_s(hf, tmp_path):
    report = convert(hf, tmp_path / "dcp", to="dcp", dtype="bf16")
    expected = {n: t.bfloat16() for n, t in by_hand(load_file(hf / "model.safetensors")).items()}
    assert_same(load_stock(tmp_path / "dcp", expected), expected)
    assert report.num_cast == len(expected) and list(report.dtypes) == ["bfloat16"]
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16


def test_cast_that_overflows_is_refused(tmp_path):
    write_llama(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e30
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"overflows:\n  norm.weight: 1 value does not fit float16"):
        convert(tmp_path / "hf", tmp_path / "dcp", to="dcp", dtype="float16")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_every_fault_of_the_source_is_reported_and_nothing_written(tmp_path):
    write_llama(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].T.contiguous()
    tensors["vision.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    for part in (
        "4 problems",
        "missing     model.layers.0.mlp.gate_proj.weight",
        "shape       model.layers.1.mlp.down_proj",
        "unexpected  model.layers.0.mlp.gate.weight",
        "unexpected  vision.weight",
    ):
        assert part in error.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_dry_run_plans_and_writes_nothing(hf, tmp_path):
    report = convert(hf, tmp_path / "dcp", to="dcp", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    done = convert(hf, tmp_path / "dcp", to="dcp")
    skipped = ("secs", "dry_run", "other_files", "needs")
    assert {k: v for k, v in asdict(report).items() if k not in skipped} == {
        k: v for k, v in asdict(done).items() if k not in skipped
    }


def test_destinations(hf, tmp_path):
    convert(hf, tmp_path / "dcp", to="dcp")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(hf, tmp_path / "dcp", to="dcp")
    convert(hf, tmp_path / "dcp", to="dcp", dtype="bf16", overwrite=True)
    assert read_manifest(tmp_path / "dcp").tensors["norm.weight"].dtype == "bfloat16"
    before = files_in(tmp_path / "dcp")
    for src, dst in (("dcp", "dcp"), ("dcp", "."), ("dcp", "dcp/hf")):
        with pytest.raises(CheckpointError):
            convert(tmp_path / src, tmp_path / dst, to="hf", overwrite=True)
    assert files_in(tmp_path / "dcp") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="mine: exists already and is not what"):
        convert(hf, tmp_path / "mine", to="dcp", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "mine"]


def test_wrong_kinds_of_source(hf, tmp_path):
    convert(hf, tmp_path / "dcp", to="dcp")
    with pytest.raises(CheckpointError, match="is a DCP checkpoint, not a Hugging Face checkpoint") as error:
        convert(tmp_path / "dcp", tmp_path / "x", to="dcp", source="hf")
    assert error.value.tries[0].startswith("titan reshard")
    with pytest.raises(CheckpointError, match="not a DCP checkpoint") as error:
        convert(hf, tmp_path / "x", to="hf", source="dcp")
    assert [" ".join(line.split()[:3]) for line in error.value.tries] == ["titan convert hf-to-dcp"]
    with pytest.raises(CheckpointError, match="not an original Meta release") as error:
        convert(hf, tmp_path / "x", to="dcp", source="meta")
    assert error.value.tries[0].startswith("titan convert hf-to-dcp")
    with pytest.raises(CheckpointError, match="no such file"):
        convert(tmp_path / "nowhere", tmp_path / "x", to="dcp")
    with pytest.raises(ConfigError, match="'int8'"):
        convert(hf, tmp_path / "x", to="dcp", dtype="int8")


def test_other_models_are_refused(tmp_path):
    write_llama(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MixtralForCausalLM"]}))
    with pytest.raises(UnsupportedError, match="MixtralForCausalLM"):
        convert(tmp_path / "hf", tmp_path / "x", to="dcp")


def test_memory_stays_below_the_model_s_size(tmp_path):
    """The peak must be of blocks of 8 MiB, not of the model."""
    folder = tmp_path / "hf"
    write_llama(folder, vocab_size=12000, hidden_size=512, intermediate_size=1024, rope_scaling=None)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 64 * 1024**2
    tracemalloc.start()
    try:
        convert(folder, tmp_path / "dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=2, tp=2)))
        convert(tmp_path / "dcp", tmp_path / "hf2", to="hf")
        convert(tmp_path / "dcp", tmp_path / "meta", to="meta")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 * 1024**2  # two workers with a block read and a block written each
    assert_same(load_file(tmp_path / "hf2" / "model.safetensors"), load_file(folder / "model.safetensors"))
