"""Model-parallel shards as fairscale's layers cut them: read as one model, written again, and ways to spoil them."""

import hashlib
import json
import random
import re
import shutil
import zipfile
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import converters.engine.units as units
from converters.common.box import Box
from converters.common.errors import CheckpointError, ConfigError, TitanError, UnsupportedError
from converters.containers import meta_shards
from converters.diff import diff
from converters.families.llama3 import FLAVORS, LLAMA3
from converters.formats.base import OutputOptions
from converters.inspect import inspect_checkpoint
from converters.layout.mesh_shape import MeshShape
from converters.source.open import open_checkpoint
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from converters.verify import verify
from tests.doors import convert
from tests.models.llama import write as write_llama
from tests.models.llama import write_meta
from tests.unit.converters.samples import load_dcp

# ColumnParallelLinear, VocabParallelEmbedding (Llama 3), ParallelEmbedding (Llama 1 and 2), RowParallelLinear
CUT = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
EMBEDDING_DIM = {"llama3": 0, "llama2": 1}
THETA = {"llama3": 500000.0, "llama2": 10000.0}
DEGREES = (1, 2, 4, 8, 16)


def cut_dim(name, family):
    module = name.split(".")[-2]
    return EMBEDDING_DIM[family] if module == "tok_embeddings" else CUT.get(module)


def make(root, family, **numbers):
    """hf/ as transformers wrote it, and full/, the same model as a Meta release of one shard made by torch.save."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 320, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 16, "rope_theta": THETA[family], "rope_scaling": None}
    model = write_llama(root / "hf", **sizes | numbers)
    write_meta(root / "full", model)
    params = json.loads((root / "full" / "params.json").read_text())
    if family == "llama3":
        params["rope_theta"] = THETA[family]
    else:  # as Llama 2's releases
        del params["rope_theta"]
        params["vocab_size"] = -1
    (root / "full" / "params.json").write_text(json.dumps(params))
    return model


@pytest.fixture(scope="module", params=["llama3", "llama2"])
def release(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    make(root, request.param)
    return root, request.param


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    root = tmp_path_factory.mktemp("llama3")
    make(root, "llama3")
    return root


def full(root):
    return torch.load(root / "full" / "consolidated.00.pth", weights_only=True)


def shards_of(state, count, family="llama3"):
    """The state dicts of `count` model-parallel ranks."""
    ranks = [{} for _ in range(count)]
    for name, tensor in state.items():
        dim = cut_dim(name, family)
        parts = [tensor] * count if dim is None else tensor.chunk(count, dim)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part.clone()
    for rank in ranks:
        rank["rope.freqs"] = torch.ones(3)
    return ranks


def save(folder, root, ranks):
    """A Meta release of these shards, as torch.save writes them."""
    folder.mkdir()
    for path in (root / "full").iterdir():
        if path.suffix == ".json":
            shutil.copy(path, folder)
    for number, rank in enumerate(ranks):
        torch.save(rank, folder / f"consolidated.{number:02d}.pth")
    return folder


def loaded(folder, count):
    return [torch.load(folder / f"consolidated.{n:02d}.pth", weights_only=True, mmap=True) for n in range(count)]


def joined(ranks, family):
    """The full tensors, as torch.cat makes them of the shards."""
    for name, tensor in ranks[0].items():
        if cut_dim(name, family) is None:
            assert all(torch.equal(rank[name], tensor) for rank in ranks), name
    dims = {name: cut_dim(name, family) for name in ranks[0]}
    return {n: ranks[0][n] if d is None else torch.cat([rank[n] for rank in ranks], d) for n, d in dims.items()}


def files_in(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def sha256s(state):
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in state.items()}


@pytest.mark.parametrize("count", DEGREES)
def test_shards_are_read_as_the_model_they_were_cut_from(release, tmp_path, count):
    root, family = release
    state = full(root)
    folder = save(tmp_path / "meta", root, shards_of(state, count, family))
    report = convert(folder, tmp_path / "dcp", to="dcp", source="meta")
    assert report.dropped == {"rope.freqs": "recomputed from rope_theta"}
    assert sha256s(load_dcp(tmp_path / "dcp", state)) == sha256s(state)
    with open_native(tmp_path / "dcp") as weights:
        assert weights.info.family == family and set(weights.source.tensors) == set(state)


@pytest.mark.parametrize("count", DEGREES)
def test_written_shards_are_what_torch_would_cut(release, tmp_path, count):
    root, family = release
    report = convert(root / "hf", tmp_path / "meta", to="meta", options=OutputOptions(num_shards=count))
    assert report.num_files == count
    assert report.num_bytes == sum(p.stat().st_size for p in (tmp_path / "meta").glob("*.pth"))
    ours, state = loaded(tmp_path / "meta", count), full(root)
    for rank, theirs in zip(ours, shards_of(state, count, family), strict=True):
        assert {**rank, "rope.freqs": theirs["rope.freqs"]}.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) and tensor.is_contiguous() for name, tensor in rank.items())
    assert sha256s(joined(ours, family)) == sha256s(state)
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    assert (params["dim"], params["n_kv_heads"]) == (64, 16)


@pytest.mark.parametrize("count", DEGREES)
def test_there_and_back_is_byte_identical(release, tmp_path, count):
    root, _ = release
    options = OutputOptions(num_shards=count)
    convert(root / "full", tmp_path / "meta", to="meta", options=options)
    convert(tmp_path / "meta", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "again", to="meta", options=options)
    assert files_in(tmp_path / "again") == files_in(tmp_path / "meta")
    convert(tmp_path / "meta", tmp_path / "one", to="meta")
    digests = {name: tensor.digest for name, tensor in read_manifest(tmp_path / "meta").tensors.items()}
    assert digests == {name: tensor.digest for name, tensor in read_manifest(tmp_path / "one").tensors.items()}


@pytest.mark.parametrize(
    ("count", "through"),
    [
        (2, "dcp"),
        (16, None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "dcp"), (4, "dcp"), (8, None))),
    ],
)
def test_c21_transformers_says_the_same_of_shards(release, tmp_path, count, through):
    root, family = release
    folder = save(tmp_path / "meta", root, shards_of(full(root), count, family))
    if through:
        convert(folder, tmp_path / through, to=through)
        folder = tmp_path / through
    convert(folder, tmp_path / "hf", to="hf")
    models = [AutoModelForCausalLM.from_pretrained(place, dtype="float32") for place in (root / "hf", tmp_path / "hf")]
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        one, other = (model(tokens).logits for model in models)
    assert torch.equal(one, other)
    assert sha256s(models[0].state_dict()) == sha256s(models[1].state_dict())


@pytest.mark.parametrize("block_bytes", [5000, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 300))])
def test_neither_blocks_nor_the_source_s_layout_matter(release, tmp_path, monkeypatch, block_bytes):
    root, _ = release
    options = OutputOptions(num_shards=4)
    convert(root / "hf", tmp_path / "whole", to="meta", options=options)
    monkeypatch.setattr(units, "BLOCK_BYTES", block_bytes)  # parts of rows, single rows, a few rows
    monkeypatch.setattr(units, "UNIT_BYTES", 2 * block_bytes)
    convert(tmp_path / "whole", tmp_path / "dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=3, tp=2)))
    convert(tmp_path / "dcp", tmp_path / "blocks", to="meta", options=options)
    assert files_in(tmp_path / "blocks") == files_in(tmp_path / "whole")


@pytest.mark.parametrize("stop_after", [1, 40, 100])
def test_a_stopped_conversion_resumes_to_the_same_shards(llama3, tmp_path, monkeypatch, stop_after):
    monkeypatch.setattr(units, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(units, "UNIT_BYTES", 4096)
    options, steps = OutputOptions(num_shards=4), []

    def advance(num_bytes):
        steps.append(num_bytes)
        if len(steps) == stop_after:
            raise KeyboardInterrupt

    def progress(total_bytes, what):
        return nullcontext(advance)

    convert(llama3 / "hf", tmp_path / "whole", to="meta", options=options)
    with pytest.raises(KeyboardInterrupt):
        convert(llama3 / "hf", tmp_path / "out", to="meta", options=options, resume=True, progress=progress)
    assert not (tmp_path / "out").exists() and len(steps) == stop_after
    convert(llama3 / "hf", tmp_path / "out", to="meta", options=options, resume=True)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


def test_a_value_in_every_shard_is_counted_once(llama3, tmp_path):
    state = full(llama3)
    state["norm.weight"][3] = torch.nan
    state["layers.0.attention.wo.weight"][5, 40] = torch.inf
    folder = save(tmp_path / "meta", llama3, shards_of(state, 4))
    with pytest.raises(CheckpointError, match="norm.weight: 1"):
        convert(folder, tmp_path / "none", to="meta", options=OutputOptions(num_shards=8))
    allowed = {"options": OutputOptions(num_shards=8), "allow_nonfinite": True}
    report = convert(folder, tmp_path / "out", to="meta", dtype="bf16", **allowed)
    assert report.non_finite == {"norm.weight": 1, "layers.0.attention.wo.weight": 1}
    ours = loaded(tmp_path / "out", 8)
    for name, tensor in state.items():
        dim = cut_dim(name, "llama3")
        found = ours[5][name] if dim is None else torch.cat([rank[name] for rank in ours], dim)
        assert torch.equal(found.nan_to_num(7), tensor.bfloat16().nan_to_num(7))


def test_the_zip_has_the_name_that_torch_gives_it(llama3, tmp_path):
    convert(llama3 / "hf", tmp_path / "meta", to="meta", options=OutputOptions(num_shards=2))
    for number in (0, 1):
        with zipfile.ZipFile(shard(tmp_path / "meta", number)) as archive:
            assert archive.testzip() is None
            assert {name.split("/")[0] for name in archive.namelist()} == {f"consolidated.{number:02d}"}


def test_a_tied_model_has_its_output_in_every_shard(tmp_path):
    make(tmp_path, "llama3", tie_word_embeddings=True)
    convert(tmp_path / "hf", tmp_path / "meta", to="meta", options=OutputOptions(num_shards=4))
    for rank in loaded(tmp_path / "meta", 4):
        assert rank["output.weight"].data_ptr() == rank["tok_embeddings.weight"].data_ptr()
    assert sha256s(joined(loaded(tmp_path / "meta", 4), "llama3")) == sha256s(full(tmp_path))
    convert(tmp_path / "meta", tmp_path / "back", to="hf")
    assert (tmp_path / "back" / "model.safetensors").stat().st_size == (
        tmp_path / "hf" / "model.safetensors"
    ).stat().st_size
    assert diff(tmp_path / "back", tmp_path / "hf").equal


def test_a_tied_llama_2_cannot_share_what_is_cut_along_two_dims(tmp_path):
    make(tmp_path, "llama2", tie_word_embeddings=True)
    convert(tmp_path / "hf", tmp_path / "meta", to="meta", options=OutputOptions(num_shards=2))
    assert sha256s(joined(loaded(tmp_path / "meta", 2), "llama2")) == sha256s(full(tmp_path))
    assert verify(tmp_path / "meta").ok and diff(tmp_path / "meta", tmp_path / "hf").equal


def test_shards_of_another_number(release, tmp_path):
    root, family = release
    folder = save(tmp_path / "eight", root, shards_of(full(root), 8, family))
    convert(folder, tmp_path / "two", to="meta", options=OutputOptions(num_shards=2))
    assert sha256s(joined(loaded(tmp_path / "two", 2), family)) == sha256s(full(root))


@pytest.mark.parametrize(("count", "kv_heads"), [(8, 4), (16, 4), (4, 1)])
def test_key_and_value_heads_that_several_shards_share(tmp_path, count, kv_heads):
    make(tmp_path, "llama3", num_key_value_heads=kv_heads)
    state = full(tmp_path)
    key_value = {name: tensor for name, tensor in state.items() if name.endswith(("wk.weight", "wv.weight"))}
    ranks = shards_of({name: tensor for name, tensor in state.items() if name not in key_value}, count)
    for name, tensor in key_value.items():
        heads = tensor.chunk(kv_heads, 0)
        for number, rank in enumerate(ranks):  # whose queries need this head
            rank[name] = heads[number * kv_heads // count].clone()
    folder = save(tmp_path / "meta", tmp_path, ranks)
    convert(folder, tmp_path / "dcp", to="dcp")
    assert sha256s(load_dcp(tmp_path / "dcp", state)) == sha256s(state)

    wk, wv = "layers.1.attention.wk.weight", "layers.0.attention.wv.weight"
    ranks[1][wk][0, 0] += 1
    ranks[count - 1][wv][-1, -1] += 1
    folder = save(tmp_path / "bad", tmp_path, ranks)
    with pytest.raises(CheckpointError, match="that must be equal in all of them") as error:
        convert(folder, tmp_path / "none", to="dcp")
    for name, number in ((wk, 1), (wv, count - 1)):
        assert f"{name}: consolidated.{number:02d}.pth" in error.value.message
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match=f"{kv_heads} key/value heads") as error:
        convert(tmp_path / "hf", tmp_path / "none", to="meta", options=OutputOptions(num_shards=count))
    assert error.value.hint == f"possible for this model: {'1, 2, 4' if kv_heads == 4 else '1'}"


@pytest.mark.parametrize(
    ("numbers", "count", "output", "possible"),
    [
        ({}, 3, "Meta's format has 1, 2, 4, 8 or 16 shards", "1, 2, 4, 8, 16"),
        ({}, 0, "Meta's format has 1, 2, 4, 8 or 16 shards", "1, 2, 4, 8, 16"),
        ({"vocab_size": 322}, 4, "does not divide 322 vocabulary entries", "1, 2"),
        ({"num_key_value_heads": 4}, 16, "does not divide 4 key/value heads", "1, 2, 4"),
    ],
)
def test_degrees_that_do_not_divide_the_model_are_refused(tmp_path, numbers, count, output, possible):
    make(tmp_path, "llama3", **numbers)
    with pytest.raises(ConfigError, match=f"--num-shards {count}.*{output}") as error:
        convert(tmp_path / "hf", tmp_path / "x", to="meta", dry_run=True, options=OutputOptions(num_shards=count))
    assert error.value.hint == f"possible for this model: {possible}"


def test_another_format_has_no_such_shards(llama3, tmp_path):
    with pytest.raises(ConfigError, match="--num-shards is not supported by a Hugging Face checkpoint"):
        convert(llama3 / "full", tmp_path / "x", to="hf", options=OutputOptions(num_shards=2))


def test_inspect_diff_and_verify_see_one_model(llama3, tmp_path):
    folder = save(tmp_path / "meta", llama3, shards_of(full(llama3), 4))
    seen = inspect_checkpoint(folder)
    assert (seen.container, seen.naming, seen.num_files) == ("meta", "meta", 4)
    assert seen.num_parameters == sum(t.numel() for t in full(llama3).values()) + 3
    assert diff(folder, llama3 / "full").equal
    report = verify(folder)
    assert report.ok and "88 items against the CRC32" in next(c.detail for c in report.checks if c.name == "files")
    convert(folder, tmp_path / "ours", to="meta", options=OutputOptions(num_shards=2))
    assert verify(tmp_path / "ours").ok and diff(tmp_path / "ours", folder).equal


def test_verify_finds_a_flipped_bit_in_any_tensor_of_any_shard(llama3, tmp_path):
    folder = save(tmp_path / "meta", llama3, shards_of(full(llama3), 2))
    catalog = open_checkpoint(folder)
    chunks = {fqn: (*entry.chunks, *catalog.copies.get(fqn, ())) for fqn, entry in catalog.tensors.items()}
    assert {len(found) for found in chunks.values()} == {2}
    for fqn in ("norm.weight", "layers.1.ffn_norm.weight", "layers.0.attention.wo.weight", "tok_embeddings.weight"):
        for chunk in chunks[fqn]:
            path = folder / chunk.file
            kept = path.read_bytes()
            spoilt = bytearray(kept)
            spoilt[chunk.byte_offset + 5] ^= 16
            path.write_bytes(spoilt)
            assert not verify(folder).ok, (fqn, chunk.file)
            path.write_bytes(kept)
    assert verify(folder).ok


# --- what is refused, and that nothing is written


def refused(folder, tmp_path, match):
    with pytest.raises(TitanError, match=match) as error:
        convert(folder, tmp_path / "none", to="dcp")
    assert not any(path.name.startswith(("none", ".tmp")) for path in tmp_path.iterdir())
    with suppress(UnsupportedError):
        assert not verify(folder).ok
    return error.value


@pytest.fixture
def four(llama3, tmp_path):
    return save(tmp_path / "meta", llama3, shards_of(full(llama3), 4))


def shard(folder, number):
    return folder / f"consolidated.{number:02d}.pth"


def test_missing_shards_are_reported(four, tmp_path):
    for number in (1, 2):
        shard(four, number).unlink()
    error = refused(four, tmp_path, "consolidated.01.pth: missing\n  consolidated.02.pth: missing")
    assert error.hint == "found: consolidated.00.pth, consolidated.03.pth"


@pytest.mark.parametrize("left", [1, 2, 3])
def test_missing_last_shards_are_found_by_the_shapes(release, tmp_path, left):
    root, family = release
    folder = save(tmp_path / "meta", root, shards_of(full(root), 4, family)[:left])
    missing = "".join(f"\n  consolidated.{number:02d}.pth: missing" for number in range(left, 4))
    error = refused(folder, tmp_path, f"cut into 4 shards, and there are {left}:")
    assert error.message.endswith(missing) and error.message.count("\n") == 4 - left


def test_extra_shards_are_reported(release, tmp_path):
    root, family = release
    ranks = shards_of(full(root), 4, family)
    folder = save(tmp_path / "meta", root, ranks + ranks[:2])
    refused(folder, tmp_path, "cut into 4 shards, and there are 6:\n  consolidated.04.pth: too many\n  consolidated.05")


@pytest.mark.parametrize("name", ["consolidated.4.pth", "consolidated.004.pth", "consolidated.00 (1).pth"])
def test_a_name_that_no_shard_has(four, tmp_path, name):
    shutil.copy(shard(four, 3), four / name)
    refused(four, tmp_path, re.escape(f"{name}: not the name of a shard"))


def test_more_than_ten_shards_are_in_the_order_of_their_numbers(llama3, tmp_path):
    folder = save(tmp_path / "meta", llama3, shards_of(full(llama3), 16))
    chunks = open_checkpoint(folder).tensors["layers.0.attention.wo.weight"].chunks
    assert [(c.file, c.box.offsets) for c in chunks] == [(f"consolidated.{n:02d}.pth", (0, 4 * n)) for n in range(16)]


def test_shards_that_changed_places_are_found_by_what_torch_wrote_into_them(four, tmp_path):
    shard(four, 0).rename(four / "x")
    shard(four, 2).rename(shard(four, 0))
    (four / "x").rename(shard(four, 2))
    error = refused(four, tmp_path, "consolidated.00.pth: was written as consolidated.02.pth")
    assert "consolidated.02.pth: was written as consolidated.00.pth" in error.message


def test_our_own_shards_that_changed_places(llama3, tmp_path):
    convert(llama3 / "full", tmp_path / "ours", to="meta", options=OutputOptions(num_shards=2))
    shard(tmp_path / "ours", 0).rename(tmp_path / "ours" / "x")
    shard(tmp_path / "ours", 1).rename(shard(tmp_path / "ours", 0))
    (tmp_path / "ours" / "x").rename(shard(tmp_path / "ours", 1))
    for manifest in (True, False):
        if not manifest:
            (tmp_path / "ours" / "titan_manifest.json").unlink()
        refused(tmp_path / "ours", tmp_path, "was written as")


def save_nameless(state, path):
    """As torch.save does into an open file: the zip's folder is called `archive`."""
    with path.open("wb") as file:
        torch.save(state, file)


def test_a_shard_that_is_there_twice_is_reported(llama3, four, tmp_path):
    ranks = shards_of(full(llama3), 4)
    ranks[2] = ranks[1]
    for number, rank in enumerate(ranks):
        save_nameless(rank, shard(four, number))
    refused(four, tmp_path, "a shard is repeated:\n  consolidated.02.pth: the same content as consolidated.01.pth")


def test_weights_that_are_all_alike_are_no_doubles(llama3, tmp_path):
    state = {name: torch.zeros_like(tensor) for name, tensor in full(llama3).items()}
    folder = save(tmp_path / "meta", llama3, shards_of(state, 4))
    convert(folder, tmp_path / "dcp", to="dcp")


def test_views_of_one_storage_in_every_shard(llama3, tmp_path):
    """torch.save of uncloned chunks writes the whole storage into each file: strides and offsets tell them apart."""
    state = full(llama3)
    ranks = [
        {n: t if (d := cut_dim(n, "llama3")) is None else t.chunk(4, d)[k] for n, t in state.items()} for k in range(4)
    ]
    folder = tmp_path / "meta"
    save(folder, llama3, [])
    for number, rank in enumerate(ranks):
        save_nameless(rank, shard(folder, number))
    convert(folder, tmp_path / "dcp", to="dcp")
    assert sha256s(load_dcp(tmp_path / "dcp", state)) == sha256s(state)
    assert verify(folder).ok


def test_a_shard_of_another_model_has_other_norms(llama3, four, tmp_path):
    other = shards_of(full(llama3), 4)[2]
    for name in other:
        other[name] = torch.randn_like(other[name])
    torch.save(other, shard(four, 2))
    error = refused(four, tmp_path, "that must be equal in all of them")
    assert all(
        f"layers.{n}.{norm}.weight: consolidated.02.pth" in error.message
        for n in (0, 1)
        for norm in ("ffn_norm", "attention_norm")
    )
    assert "consolidated.01" not in error.message and "consolidated.03" not in error.message


def test_one_bit_of_one_norm_is_reported(llama3, four, tmp_path):
    other = shards_of(full(llama3), 4)[3]
    other["norm.weight"].view(torch.int32)[7] ^= 1
    torch.save(other, shard(four, 3))
    error = refused(four, tmp_path, "that must be equal in all of them")
    assert error.message.endswith(":\n  norm.weight: consolidated.03.pth")


def test_shards_that_differ_in_names_shapes_and_dtypes_are_all_reported(llama3, four, tmp_path):
    ranks = shards_of(full(llama3), 4)
    ranks[1]["layers.0.attention.wq.weight"] = ranks[1]["layers.0.attention.wq.weight"].bfloat16()
    ranks[0]["norm.weight"] = ranks[0]["norm.weight"][:-1]
    ranks[2]["layers.7.extra"] = torch.zeros(2)
    del ranks[3]["output.weight"]
    for number, rank in enumerate(ranks):
        torch.save(rank, shard(four, number))
    message = refused(four, tmp_path, "the shards have different contents").message
    for line in (
        "layers.0.attention.wq.weight: bfloat16 [16, 64] in consolidated.01.pth, float32 [16, 64] in others",
        "norm.weight: float32 [63] in consolidated.00.pth, float32 [64] in others",
        "layers.7.extra: float32 [2] in consolidated.02.pth, nothing in others",
        "output.weight: nothing in consolidated.03.pth, float32 [80, 64] in others",
    ):
        assert f"\n  {line}" in message
    assert message.count("\n") == 4


def test_shapes_that_are_not_those_of_params_json_are_all_reported(llama3, four, tmp_path):
    ranks = shards_of(full(llama3), 4)
    for rank in ranks:
        rank["layers.0.attention.wo.weight"] = rank["layers.0.attention.wo.weight"].t().contiguous()
        rank["layers.1.feed_forward.w2.weight"] = torch.zeros(64, 32)
        rank["norm.weight"] = torch.zeros(16)
    for number, rank in enumerate(ranks):
        torch.save(rank, shard(four, number))
    message = refused(four, tmp_path, "4 shards do not make the model of params.json").message
    for line in (
        "layers.0.attention.wo.weight: [16, 64] in each shard, [64, 64] in all",
        "layers.1.feed_forward.w2.weight: [64, 32] in each shard, [64, 256] in all",
        "norm.weight: [16] in each shard, [64] in all",
    ):
        assert f"\n  {line}" in message
    assert message.count("\n") == 3


def test_a_tensor_that_no_llama_has_is_reported_with_its_files(llama3, four, tmp_path):
    for number, rank in enumerate(shards_of(full(llama3), 4)):
        torch.save(rank | {"adapter.weight": torch.ones(2, 2)}, shard(four, number))
    error = refused(four, tmp_path, "unexpected  adapter.weight in consolidated.00.pth")
    assert "unexpected  adapter.weight in consolidated.03.pth" in error.message
    report = convert(four, tmp_path / "dcp", to="dcp", allow_extra=True)
    assert {*report.extra} == {f"adapter.weight in consolidated.{number:02d}.pth" for number in range(4)}
    state = full(llama3)
    assert sha256s(load_dcp(tmp_path / "dcp", state)) == sha256s(state)


def test_a_tensor_that_every_shard_lacks_is_missing(llama3, four, tmp_path):
    for number, rank in enumerate(shards_of(full(llama3), 4)):
        del rank["layers.1.attention.wo.weight"], rank["layers.0.ffn_norm.weight"]
        torch.save(rank, shard(four, number))
    error = refused(four, tmp_path, "missing     layers.1.attention.wo.weight")
    assert "missing     layers.0.ffn_norm.weight" in error.message


def test_truncated_shards_are_all_reported(four, tmp_path):
    for number in (1, 3):
        path = shard(four, number)
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 9 // 10])
    error = refused(four, tmp_path, "2 shards cannot be opened")
    assert "consolidated.01.pth: " in error.message and "consolidated.03.pth: " in error.message


def test_an_empty_shard(four, tmp_path):
    shard(four, 2).write_bytes(b"")
    refused(four, tmp_path, "consolidated.02.pth: is empty")


def test_params_json_that_is_wrong_is_reported_with_its_place(four, tmp_path):
    params = json.loads((four / "params.json").read_text())
    (four / "params.json").write_text(json.dumps(params | {"n_layers": 5000}))
    refused(four, tmp_path, "tensors are too few for 5,000 layers")
    (four / "params.json").write_text(json.dumps(params | {"dim": "64"}))
    refused(four, tmp_path, re.escape(f"{four}: params.json lacks numbers"))
    (four / "params.json").unlink()
    refused(four, tmp_path, "params.json is missing")


def test_a_row_cut_weight_is_read_in_blocks(llama3, four, monkeypatch):
    """Rows of wo lie in all files: a block of them is one run in each, and no file is read through."""
    from converters.engine import read

    monkeypatch.setattr(read, "BLOCK_BYTES", 1024)
    seen = []
    with read.CatalogReader(open_checkpoint(four)) as reader:
        reader.on_read = lambda file, start, view: seen.append(len(view))
        found = reader.read("layers.0.feed_forward.w2.weight", Box((8, 0), (4, 256)))
    assert torch.equal(torch.from_numpy(found), full(llama3)["layers.0.feed_forward.w2.weight"][8:12])
    assert sum(seen) == found.nbytes and len(seen) == 4


def test_any_box_can_be_read_of_any_number_of_shards(release, tmp_path):
    """What trainer and inference do: each rank reads its slices."""
    root, family = release
    state, generator = full(root), random.Random(0)
    for count in (2, 8, 16):
        folder = save(tmp_path / str(count), root, shards_of(state, count, family))
        with open_native(folder) as weights:
            for name, tensor in state.items():
                low = tuple(generator.randrange(n) for n in tensor.shape)
                sizes = tuple(generator.randint(1, n - at) for n, at in zip(tensor.shape, low, strict=True))
                part = tensor[tuple(slice(at, at + n) for at, n in zip(low, sizes, strict=True))]
                assert torch.equal(torch.from_numpy(weights.source.read(name, Box(low, sizes))), part), (name, low)


def test_the_embedding_s_cut_follows_from_its_shape():
    square = LLAMA3.parameters(replace(FLAVORS["debug_gqa"], vocab_size=64, dim=64))[0]
    assert (square.fqn, square.shape) == ("tok_embeddings.weight", (64, 64))
    assert meta_shards._cut_dim(square, (16, 64), 4) == 0
    assert meta_shards._cut_dim(square, (64, 16), 4) == 1
    assert meta_shards._cut_dim(square, (64, 64), 4) is None
