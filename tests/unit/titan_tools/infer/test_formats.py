"""`titan infer` on every kind of checkpoint: transformers' greedy tokens, without a conversion, or what is missing."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from converters.engine.read import CatalogReader
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import read_model_info, write_model_info
from converters.source.open import open_checkpoint
from converters.store.folder_output import FolderOutput
from converters.store.manifest import TensorSum, read_manifest
from converters.store.output import write_manifest
from tests.checkpoint_forms import FORMS, native, write_byte_ranks
from tests.doors import reshard
from tests.fp8_folders import dequantized, save, write_fp8
from tests.greedy_reference import greedy
from tests.models.dense import SCALING
from tests.models.dense import write as write_tiny
from tests.models.llama import BOS, EOS, write_tokenizer
from tests.refusals import refusal_of

PROMPT = "def main("
NUM_NEW = 12
MODELS = {
    "llama": ("llama3", {"rope_scaling": SCALING, "max_position_embeddings": 131072}),
    "llama, tied": ("llama3_tied", {"rope_scaling": SCALING | {"factor": 32.0}, "max_position_embeddings": 131072}),
    "qwen3": ("qwen3", {"num_hidden_layers": 2}),
    "qwen3, tied": ("qwen3_tied", {}),
}
ASK = ("--prompt", PROMPT, "--max-new-tokens", NUM_NEW, "--ignore-eos", "--json")
pytestmark = pytest.mark.usefixtures("one_thread")


def write_model(folder, called, dtype=torch.float32):
    """transformers' model and its HF folder, whose tokenizer has the bytes and BOS."""
    name, numbers = MODELS[called]
    common = {"vocab_size": 302, "bos_token_id": BOS, "eos_token_id": EOS}
    model = write_tiny(folder, name, dtype=dtype, numbers=common | numbers)
    if called.startswith("llama"):  # torchtune and Meta's code want a tiktoken file
        write_byte_ranks(folder / "tokenizer.model")
        return model, [BOS, *PROMPT.encode()]
    write_tokenizer(folder)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    """An HF folder, and transformers' greedy tokens after the prompt, each likeliest by far."""
    folder = tmp_path_factory.mktemp("hf")
    model, prompt = write_model(folder, request.param)
    (said,) = greedy(model, [prompt], NUM_NEW)
    assert min(said.gaps) > 1e-3
    return folder, prompt, said.tokens


# Every model in every form: test_parity.py, in the slow set
PAIRS = [("llama, tied", form) for form in FORMS]
PAIRS += [(model, "dcp for a mesh") for model in MODELS if model != "llama, tied"]


@pytest.mark.parametrize(("source", "form"), PAIRS, indirect=["source"])
def test_greedy_tokens_are_those_of_transformers(titan, source, form, tmp_path):
    hf, prompt, expected = source
    place = FORMS[form].write(hf, tmp_path)
    model_from = () if FORMS[form].says_model else ("--model-from", hf)
    code, out, err = titan("infer", place, *ASK, *model_from)
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert result["prompt_tokens"] == prompt
    assert result["tokens"] == expected


def ids(printed):
    (result,) = json.loads(printed)["results"]
    return result["tokens"]


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """An HF folder in bf16, and transformers' fp32 tokens with those weights."""
    folder = tmp_path_factory.mktemp("half")
    _, prompt = write_model(folder, "llama, tied", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # .to() would round RoPE, too
    (said,) = greedy(model, [prompt], NUM_NEW)
    assert min(said.gaps) > 1e-3
    return folder, said.tokens


@pytest.mark.parametrize("form", ["hf", "dcp for a mesh", "torch .pt", "meta", "torchtune's own"])
def test_bfloat16_is_computed_as_it_is_stored_or_in_float32(titan, half, form, tmp_path):
    hf, expected = half
    place = FORMS[form].write(hf, tmp_path)
    model_from = () if FORMS[form].says_model else ("--model-from", hf)
    code, out, err = titan("infer", place, *ASK, *model_from, "--dtype", "float32")
    assert code == 0, err
    assert ids(out) == expected
    as_stored = titan("infer", place, *ASK, *model_from)
    assert json.loads(as_stored[1])["stats"]["dtype"] == "bfloat16"
    assert ids(as_stored[1]) == ids(titan("infer", hf, *ASK)[1])


LLAMA = pytest.mark.parametrize("source", ["llama, tied"], indirect=True)


@LLAMA
@pytest.mark.parametrize("steps", ["run/checkpoint", "run/elsewhere", "run"])
def test_a_runs_folder_wherever_it_keeps_its_steps(titan, source, steps, tmp_path):
    hf, _, expected = source
    made = FORMS["dcp"].write(hf, tmp_path)
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    (tmp_path / steps).mkdir(exist_ok=True)
    made.rename(tmp_path / steps / "step-7")
    code, out, err = titan("infer", tmp_path / "run", *ASK)
    assert code == 0 and f"reading {tmp_path / steps / 'step-7'}" in err
    assert ids(out) == expected


@LLAMA
def test_two_folders_of_steps_are_not_chosen_between(titan, source, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "run" / name).mkdir(parents=True)
        FORMS["dcp"].write(source[0], tmp_path / "run" / name).rename(tmp_path / "run" / name / "step-7")
    err = refusal_of(titan("infer", tmp_path / "run", *ASK), as_json=True)
    assert "the folder of a run" in err and "step-7" in err


@LLAMA
@pytest.mark.parametrize("where", ["folder", "repository", "file"])
def test_model_from_may_be_anything_that_opens(titan, source, where, tmp_path):
    hf, _, expected = source
    place = FORMS["torchtitan"].write(hf, tmp_path)
    model_from = {"folder": "hf", "repository": "hf cache, repository", "file": "hf, its file"}[where]
    (tmp_path / "from").mkdir()
    code, out, err = titan("infer", place, *ASK, "--model-from", FORMS[model_from].write(hf, tmp_path / "from"))
    assert code == 0, err
    assert ids(out) == expected


@LLAMA
@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_a_tokenizer_alone_may_come_from_elsewhere(titan, source, form, tmp_path):
    hf, _, expected = source
    place = FORMS[form].write(hf, tmp_path)
    shutil.copytree(place, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "titan_manifest.json"))
    err = refusal_of(titan("infer", tmp_path / "bare", *ASK), as_json=True)
    assert f"there is no tokenizer in {tmp_path / 'bare'}" in err and "--model-from FOLDER" in err
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(hf / "tokenizer.model", tmp_path / "tokenizer")
    code, out, err = titan("infer", tmp_path / "bare", *ASK, "--model-from", tmp_path / "tokenizer")
    assert code == 0, err
    assert ids(out) == expected


@LLAMA
@pytest.mark.parametrize("form", ["torchtitan", "torch .pt", "torch, a loop's own"])
def test_what_does_not_say_its_model_is_reported_how_to(titan, source, form, tmp_path):
    err = refusal_of(titan("infer", FORMS[form].write(source[0], tmp_path), *ASK), as_json=True)
    assert "describes the model" in err and "--model-from FOLDER" in err


@LLAMA
def test_a_model_from_that_is_not_there_is_reported(titan, source, tmp_path):
    place = FORMS["torch .pt"].write(source[0], tmp_path)
    err = refusal_of(titan("infer", place, *ASK, "--model-from", tmp_path / "missing"), as_json=True)
    assert f"{tmp_path / 'missing'}: no such file or folder" in err


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """What a run saves: weights, an optimizer of twice their size in the same files, digests; and the tokens."""
    root = tmp_path_factory.mktemp("training")
    model, prompt = write_model(root / "hf", "llama")
    weights = native(root / "hf")
    moments = {f"state.{fqn}.{m}": torch.ones_like(w) for fqn, w in weights.items() for m in ("exp_avg", "exp_avg_sq")}
    state = weights | {"optimizer": moments, "train_state": {"step": 7}}
    dcp.save(state, checkpoint_id=str(root / "saved"), no_dist=True)
    write_model_info(root / "saved", read_model_info(root / "hf"))
    shutil.copy(root / "hf" / "tokenizer.model", root / "saved")
    reshard(root / "saved", root / "step-7", mesh=MeshShape(dp_shard=2))
    return root / "step-7", greedy(model, [prompt], NUM_NEW)[0].tokens


def flip(folder, fqn):
    """A bit in the middle of a tensor's first part; the name of the file."""
    catalog = open_checkpoint(folder)
    with CatalogReader(catalog) as reader:
        chunk = reader.located(fqn, catalog.tensors[fqn].chunks[0])
    data = bytearray((folder / chunk.file).read_bytes())
    data[chunk.byte_offset + 13] ^= 1
    (folder / chunk.file).write_bytes(data)
    return chunk.file


def test_an_fp8_folder_computes_with_its_values(titan, tmp_path):
    write_model(tmp_path / "bf16", "qwen3", dtype=torch.bfloat16)
    fp8 = write_fp8(tmp_path / "fp8", tmp_path / "bf16", block=(16, 16), files=2)
    save(tmp_path / "values", dequantized(fp8, block=(16, 16)), tmp_path / "bf16", None)
    code, out, err = titan("infer", fp8, *ASK)
    assert code == 0, err
    assert ids(out) == ids(titan("infer", tmp_path / "values", *ASK)[1])


@pytest.mark.parametrize("fqn", ["layers.1.attention.wk.weight", "norm.weight", "tok_embeddings.weight"])
def test_a_damaged_weight_next_to_an_optimizer_is_reported(titan, training, fqn, tmp_path):
    folder = shutil.copytree(training[0], tmp_path / "step-7")
    flip(folder, fqn)
    err = refusal_of(titan("infer", folder, *ASK), as_json=True)
    assert f"\n  {fqn}: its values are not those that titan_manifest.json lists\n" in err
    assert f"try: titan verify {folder}" in err and "nothing of the copy" not in err


def test_an_optimizer_is_not_read_for_damage(titan, training, tmp_path):
    """It is two thirds of a training checkpoint, in the same files, and says nothing."""
    folder = shutil.copytree(training[0], tmp_path / "step-7")
    flip(folder, "optimizer.state.norm.weight.exp_avg")
    code, out, err = titan("infer", folder, *ASK)
    assert code == 0, err
    assert ids(out) == training[1]


def test_a_damaged_small_file_next_to_an_optimizer_is_reported(titan, training, tmp_path):
    folder = shutil.copytree(training[0], tmp_path / "step-7")
    metadata = folder / ".metadata"
    changed = metadata.read_bytes().replace(b"norm.weight", b"norn.weight", 1)
    metadata.write_bytes(changed)
    refusal_of(titan("infer", folder, *ASK), as_json=True)


def test_without_digests_the_files_are_read_for_damage(titan, training, tmp_path):
    folder = shutil.copytree(training[0], tmp_path / "step-7")
    manifest = read_manifest(folder)
    bare = {fqn: TensorSum(t.dtype, t.shape, "") for fqn, t in manifest.tensors.items()}
    write_manifest(FolderOutput(folder), tensors=bare, files=manifest.files)
    assert titan("infer", folder, *ASK)[0] == 0
    file = flip(folder, "optimizer.state.norm.weight.exp_avg")
    err = refusal_of(titan("infer", folder, *ASK), as_json=True)
    assert f"{file}: its bytes have changed (CRC32)" in err


def test_a_damaged_step_of_a_run_is_passed_over_as_in_training(titan, training, tmp_path):
    for step in (5, 7, 8, 9):
        shutil.copytree(training[0], tmp_path / "run" / "checkpoint" / f"step-{step}")
    older = tmp_path / "run" / "checkpoint" / "step-7"
    (tmp_path / "run" / "checkpoint" / "step-9" / ".metadata").unlink()
    unreadable = tmp_path / "run" / "checkpoint" / "step-8" / ".metadata"  # of which no catalog can be made
    unreadable.write_bytes(bytes(unreadable.stat().st_size))
    flip(older, "norm.weight")
    code, out, err = titan("infer", tmp_path / "run", *ASK)
    assert code == 0, err
    assert ids(out) == training[1]
    assert f"WARNING: skipping a damaged step: {older}" in err and "step-5" in err
    assert err.count("skipped step-9") == 1
    assert err.count("skipped step-8: .metadata: its bytes have changed (CRC32)") == 1
    refusal_of(titan("infer", older, *ASK), as_json=True)  # one that was named is that one


def test_a_run_whose_steps_are_all_damaged_is_refused(titan, training, tmp_path):
    for step in (5, 7):
        flip(shutil.copytree(training[0], tmp_path / f"step-{step}"), "norm.weight")
    err = refusal_of(titan("infer", tmp_path, *ASK), as_json=True)
    assert f"no step in {tmp_path} is complete" in err
