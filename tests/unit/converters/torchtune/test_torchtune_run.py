"""torchtune's own command fine-tunes what we export, as it is, and what it saves comes back."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config
from torchtune.data import padded_collate_sft
from transformers import AutoModelForCausalLM, AutoTokenizer

from converters.formats.base import OutputOptions
from converters.store.manifest import read_manifest
from tests.doors import convert
from tests.unit.converters.torchtune.torchtune_folders import STYLES, make_case

pytestmark = pytest.mark.slow  # in the suite, torchtune reads the recipes: test_torchtune_output.py
TUNE = Path(sys.executable).with_name("tune")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """No network, no cache of an earlier run, one thread."""
    home = tmp_path_factory.mktemp("home")
    own = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": ""}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


def tune(folder, environment, *overrides, recipe="full_finetune_single_device"):
    """`tune run` from another folder; its loss at each step."""
    command = [TUNE, "run", recipe, "--config", folder / "torchtune.yaml", *overrides]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = Path(f"{folder}-finetuned", "logs").glob("*.txt")
    return [float(loss) for loss in re.findall(r"loss:(\S+)", log.read_text())]


def loss_of_transformers(case, folder, num_rows=2):
    """Of the first batch that torchtune's sampler deals: its order is a permutation from seed 0."""
    recipe = OmegaConf.load(folder / "torchtune.yaml")
    tokenizer = config.instantiate(recipe.tokenizer)
    dataset = config.instantiate(recipe.dataset, tokenizer)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    batch = padded_collate_sft([dataset[row] for row in order[:num_rows]], padding_idx=tokenizer.pad_id)
    with torch.no_grad():
        return case.model(batch["tokens"], labels=batch["labels"]).loss.item()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, environment):
    """A tied model in these styles, fine-tuned by the command that the recipe names, with no override."""
    case = make_case(tmp_path_factory.mktemp("a folder"), "3.2")
    return case, {style: tune(case.root / style, environment) for style in STYLES}


def test_the_loss_is_transformers_and_the_same_in_every_style(runs, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    case, losses = runs
    assert all(found == losses["hf"] for found in losses.values())
    assert len(losses["hf"]) == 4
    assert losses["hf"][0] == pytest.approx(loss_of_transformers(case, case.root / "hf"), rel=1e-6)


def test_an_epoch_comes_back(runs, tmp_path):
    case, styles = runs
    for style in styles:
        convert(case.root / f"{style}-finetuned" / "epoch_0", tmp_path / style, to="dcp", source="torchtune")
    manifests = [read_manifest(tmp_path / style).tensors for style in styles]
    assert all(manifest == manifests[0] for manifest in manifests)
    assert manifests[0] != read_manifest(case.root / "dcp").tensors
    output = {(tmp_path / style / "titan_model.json").read_text() for style in styles}
    assert {json.dumps(json.loads(text)["args"]) for text in output} == {
        json.dumps(json.loads((case.root / "dcp" / "titan_model.json").read_text())["args"])
    }
    convert(tmp_path / [*styles][-1], tmp_path / "back", to="hf")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(case.root / "hf-finetuned" / "epoch_0").state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    text = "What is the capital of France?"
    ids = [AutoTokenizer.from_pretrained(tmp_path / "back").encode(text)]
    ids.append(AutoTokenizer.from_pretrained(case.root / "hf-finetuned" / "epoch_0").encode(text))
    assert ids[0] == ids[1]


def test_llama_2_with_one_s_own_conversations(tmp_path, environment, monkeypatch):
    case = make_case(tmp_path, "2")
    turns = [{"role": "user", "content": "What is the fox?"}, {"role": "assistant", "content": "Quick and brown."}]
    (tmp_path / "mine.json").write_text(json.dumps([{"messages": turns}] * 3))
    shutil.rmtree(case.root / "hf")
    convert(case.root / "dcp", case.root / "hf", to="torchtune", options=OutputOptions(dataset=tmp_path / "mine.json"))
    losses = tune(case.root / "hf", environment, "epochs=2", "optimizer.lr=1e-3")
    assert len(losses) == 2 and losses[1] < losses[0]
    assert losses[0] == pytest.approx(loss_of_transformers(case, case.root / "hf"), rel=1e-6)
    convert(tmp_path / "hf-finetuned" / "epoch_1", tmp_path / "back", to="dcp", source="torchtune")


@pytest.mark.parametrize("style", STYLES)
def test_lora_leaves_an_adapter_next_to_the_weights(tmp_path, environment, style):
    case = make_case(tmp_path, "3.1")
    lora = ["model._component_=torchtune.models.llama3_1.lora_llama3_1", "model.lora_attn_modules=[q_proj,v_proj]"]
    lora += ["model.apply_lora_to_mlp=True", "model.lora_rank=4", "model.lora_alpha=8", "optimizer.lr=1e-2"]
    lora += ["lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"]
    lora += ["lr_scheduler.num_warmup_steps=1"]
    tune(case.root / style, environment, *lora, recipe="lora_finetune_single_device")
    epoch = tmp_path / f"{style}-finetuned" / "epoch_0"
    assert (epoch / "adapter_model.pt").exists()
    convert(epoch, tmp_path / "back", to="dcp", source="torchtune")
    before, after = (read_manifest(tmp_path / name).tensors for name in ("dcp", "back"))
    changed = {name.split(".", 2)[-1] for name in after if after[name] != before[name]}
    mlp = {f"feed_forward.{w}.weight" for w in ("w1", "w2", "w3")}
    assert changed == {"attention.wq.weight", "attention.wv.weight"} | mlp


def test_of_a_run_of_several_epochs_each_comes_back(tmp_path, environment):
    case = make_case(tmp_path, "3.1")
    losses = tune(case.root / "hf", environment, "epochs=2", "max_steps_per_epoch=1")
    run = tmp_path / "hf-finetuned"
    assert (run / "recipe_state" / "recipe_state.pt").exists()
    for epoch in (0, 1):
        convert(run / f"epoch_{epoch}", tmp_path / f"back{epoch}", to="dcp", source="torchtune")
    assert read_manifest(tmp_path / "back0").tensors != read_manifest(tmp_path / "back1").tensors
    shutil.rmtree(run / "epoch_1")
    shutil.rmtree(run / "logs")
    output = re.search(r"# (epoch_0/\S+)", (case.root / "hf" / "torchtune.yaml").read_text())[1]
    files = f"checkpointer.checkpoint_files=[{output}]"
    again = tune(
        case.root / "hf", environment, "epochs=2", "max_steps_per_epoch=1", "resume_from_checkpoint=True", files
    )
    assert again == losses[1:]
    convert(run / "epoch_1", tmp_path / "again", to="dcp", source="torchtune")
    assert read_manifest(tmp_path / "again").tensors == read_manifest(tmp_path / "back1").tensors
