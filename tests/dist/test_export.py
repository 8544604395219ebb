"""What a finished run hands on: folders that transformers and torchtune open, and a last step in another dtype."""

import json
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config as torchtune
from transformers import AutoModelForCausalLM, AutoTokenizer

from converters.families.llama3 import LLAMA3
from converters.model.model_info import read_model_info
from converters.source.open import open_checkpoint
from converters.store.manifest import check_files, read_manifest
from tests.dist import runs
from trainer.models.registry import get_trainer_family

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the stock reader, in this process
FSDP2 = runs.FSDP2
TOKENS = torch.arange(runs.SEQ_LEN)[None] * 7 % 290


def _config(data, dump, *, steps=2, **checkpoint):
    checkpoint = {"last_save_in_hf": True, "last_save_in_torchtune": True, "interval": 10} | checkpoint
    return runs.make_config(data, dump, steps=steps, checkpoint=checkpoint, **FSDP2)


@pytest.fixture(scope="module")
def exported(pools, data, tmp_path_factory):
    """The dump folder of a run of two steps."""
    dump = tmp_path_factory.mktemp("exported")
    (error, talk), other = pools[2].run(runs.run_and_hear, _config(data, dump))
    assert (error, other) == ("", ("", ""))
    assert f"exported step-2 to {dump / 'export-hf'}: 21 tensors of float32" in talk, talk
    return dump


@pytest.fixture(scope="module")
def expected(exported):
    """What the trainer's model says, with the weights that the run has left."""
    model = get_trainer_family("llama3").build_model(runs.TWO_LAYERS)
    weights = model.state_dict()
    torch.distributed.checkpoint.load(weights, checkpoint_id=str(exported / "checkpoint" / "step-2"), no_dist=True)
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(TOKENS, torch.arange(runs.SEQ_LEN))


def test_transformers_opens_the_export_and_gives_the_trainers_logits(exported, expected):
    model = AutoModelForCausalLM.from_pretrained(exported / "export-hf").eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        assert (model(TOKENS).logits - expected).abs().max() < 1e-4 < expected.abs().max() / 100
    assert AutoTokenizer.from_pretrained(exported / "export-hf").encode("word1 word2")
    assert check_files(exported / "export-hf") == []


def test_torchtune_opens_the_export_and_gives_the_trainers_logits(exported, expected, tmp_path):
    recipe = OmegaConf.load(exported / "export-torchtune" / "torchtune.yaml")
    recipe.output_dir = str(tmp_path)
    model = torchtune.instantiate(recipe.model).eval()
    model.load_state_dict(torchtune.instantiate(recipe.checkpointer).load_checkpoint()["model"])
    torchtune.instantiate(recipe.tokenizer)
    with torch.no_grad():
        assert (model(TOKENS) - expected).abs().max() < 1e-4
    assert check_files(exported / "export-torchtune") == []


def test_the_dtype_is_what_was_asked_for_and_the_last_step_stays_whole(pools, data, exported, tmp_path):
    config = _config(data, tmp_path, export_dtype="bfloat16", last_save_in_torchtune=False)
    assert pools[2].run(runs.run, config) == ["", ""]
    weights = open_checkpoint(tmp_path / "export-hf").tensors
    assert {tensor.dtype for tensor in weights.values()} == {"bfloat16"}
    assert not (tmp_path / "export-torchtune").exists()
    step = tmp_path / "checkpoint" / "step-2"
    assert runs.differences(step, exported / "checkpoint" / "step-2") == []  # resumable, in the training's dtype


def test_a_model_only_last_step_takes_the_dtype(pools, data, exported, tmp_path):
    last = {"last_save_model_only": True, "last_save_in_torchtune": False, "export_dtype": "bfloat16"}
    assert pools[2].run(runs.run, _config(data, tmp_path, **last)) == ["", ""]
    step, whole = tmp_path / "checkpoint" / "step-2", exported / "checkpoint" / "step-2"
    sums = read_manifest(step).tensors
    assert {entry.dtype for entry in sums.values()} == {"bfloat16"} and "optimizer" not in str(sums)
    loaded = [{fqn: torch.zeros(s.shape, dtype=dtype) for fqn, s in sums.items()} for dtype in (torch.bfloat16, None)]
    for weights, path in zip(loaded, (step, whole), strict=True):
        torch.distributed.checkpoint.load(weights, checkpoint_id=str(path), no_dist=True)
    assert all(torch.equal(loaded[0][fqn], loaded[1][fqn].bfloat16()) for fqn in sums)
    assert {t.dtype for t in open_checkpoint(tmp_path / "export-hf").tensors.values()} == {"bfloat16"}


def test_the_fields_of_the_initial_config_are_in_checkpoints_and_exports(pools, data, exported, tmp_path):
    """What titan does not translate, after a step from an HF folder and after another from the run's own checkpoint."""
    start = shutil.copytree(exported / "export-hf", tmp_path / "start")
    (start / "titan_manifest.json").unlink()
    (start / "LICENSE").write_text("terms")
    (start / "generation_config.json").write_text('{"bos_token_id": 5, "do_sample": true}')
    fields = {"attention_dropout": 0.1, "use_cache": False, "own": {"a": None}, "bos_token_id": 5}
    config = json.loads((start / "config.json").read_text()) | fields
    (start / "config.json").write_text(json.dumps(config))
    dump, settings = tmp_path / "dump", {"last_save_in_torchtune": False, "initial_load_path": str(start)}
    for steps in (1, 2):
        heard = pools[2].run(runs.run_and_hear, _config(data, dump, steps=steps, **settings))
        assert [error for error, _ in heard] == ["", ""]
        output = (
            f"not copied from {start} into this run's checkpoints: LICENSE, generation_config.json (" in heard[0][1]
        )
        assert output == ("bos_token_id = 5 (the run: " in heard[0][1]) == (steps == 1), heard[0][1]
        del fields["bos_token_id"]  # of the run's own tokenizer
        info = read_model_info(dump / "checkpoint" / f"step-{steps}")
        assert fields.items() <= info.untranslated.items() and "bos_token_id" not in info.untranslated
        fields["bos_token_id"] = info.token_ids.get("bos_token_id")
        written = json.loads((dump / "export-hf" / "config.json").read_text())
        assert {key: written.get(key) for key in fields} == fields


def test_an_export_is_replaced_only_where_it_is_ours_and_the_run_went_on(pools, data, exported, tmp_path):
    dump = tmp_path / "dump"
    shutil.copytree(exported, dump)
    before = read_manifest(dump / "export-hf")

    heard = pools[2].run(runs.run_and_hear, _config(data, dump))  # the run is done: nothing is made anew
    assert [error for error, _ in heard] == ["", ""] and "export-hf exists already" in heard[0][1]
    assert read_manifest(dump / "export-hf") == before

    shutil.rmtree(dump / "export-hf")  # as if killed while it was made
    assert pools[2].run(runs.run, _config(data, dump)) == ["", ""]
    assert read_manifest(dump / "export-hf") == before

    (dump / "export-hf" / "notes.txt").write_text("mine")
    output = pools[2].run(runs.run, _config(data, dump, steps=3))
    assert all("export-hf would be replaced" in t and "notes.txt: not written by titan" in t for t in output)
    assert max(runs.read_losses(dump)) == 2  # reported before the first step

    (dump / "export-hf" / "notes.txt").unlink()
    recipe = dump / "export-torchtune" / "torchtune.yaml"
    recipe.write_text(recipe.read_text() + "\n# mine")
    output = pools[2].run(runs.run, _config(data, dump, steps=3))
    assert all("torchtune.yaml: edited" in t for t in output)

    assert pools[2].run(runs.run, _config(data, dump, steps=3, last_save_in_torchtune=False)) == ["", ""]
    assert read_manifest(dump / "export-hf") != before
    assert sorted(p.name for p in dump.iterdir() if p.name.startswith(".")) == []


def test_a_disk_without_room_for_the_export_is_reported_before_the_first_step(pools, data, tmp_path):
    config = _config(data, tmp_path)
    bytes_of_step = 3 * 4 * LLAMA3.num_parameters(runs.TWO_LAYERS)
    output = pools[2].run(runs.run_on_a_full_disk, config, bytes_of_step + (1 << 20))
    assert all("export-hf: needs" in t for t in output), output
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_model_that_torchtune_cannot_build_is_reported_before_the_first_step(pools, data, tmp_path):
    (tmp_path / "empty").mkdir()
    config = _config(data, tmp_path / "dump", last_save_in_hf=False)
    config = runs.replace(config, model=runs.replace(config.model, name="qwen3", flavor="debug_gqa"))
    output = pools[2].run(runs.run, config)
    assert all(t.startswith("UnsupportedError") and "torchtune" in t for t in output), output
    assert not (tmp_path / "dump" / "metrics.jsonl").exists()
