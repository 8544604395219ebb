"""docs/extend.md is true: its files are a family, a dataset and a loss outside this package, and its commands run.

The family is one that transformers has, so its logits are compared with those.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.source.weights import open_native
from tests.dist import runs
from titan_tools import cli
from trainer.config.custom_import import import_custom
from trainer.models.registry import get_trainer_family

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extend.md").read_text()
RUN_ALL = """
import json, os, sys
from titan_tools import cli
commands, before = json.loads(sys.argv[1]), dict(os.environ)
for command in commands:
    sys.argv = command
    os.environ.clear()
    os.environ.update(before)  # each as in a process of its own
    print(f"$ {command[-1]}", flush=True)
    if code := cli.run():
        sys.exit(f"{command} ended with {code}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of the page, and the tokenizer of its first command."""
    folder = tmp_path_factory.mktemp("outside")
    for name, content in re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.S):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    command = shlex.split(re.findall(r"```console\n\$ (titan data prepare .*)\n", PAGE)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        patch.chdir(folder)
        assert cli.run() == 0
    return folder


def train_in_a_layout(folder, config):
    """Case: a run of the page's family, data and loss."""
    import_custom(str(folder / "mine"))
    return runs.run(config)


def logits_of(folder, checkpoint, tokens):
    """Case: what the page's model says to tokens, from a checkpoint of any format."""
    from titan_tools.infer.model.load import load_model

    import_custom(str(folder / "mine"))
    with open_native(checkpoint) as weights:
        model = load_model(weights.source, weights.info, dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        return model.head(model.body(torch.tensor([tokens])))[0].tolist()


def convert_there_and_back(folder, source, destination):
    """Case: Hugging Face to DCP and back."""
    from tests.doors import convert

    import_custom(str(folder / "mine"))
    convert(source, destination / "dcp", to="dcp")
    convert(destination / "dcp", destination / "hf", to="hf")


def _environment():
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in ranks} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_the_commands_of_the_page_run(folder):
    (block,) = re.findall(r"```console\n(.*?)```", PAGE, re.S)
    made, *commands = [shlex.split(line.removeprefix("$ ")) for line in block.splitlines()]
    assert (
        made[:3] == ["titan", "data", "prepare"]
        and len(commands) >= 7
        and {command[0] for command in commands} == {"titan"}
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN_ALL, json.dumps(commands)],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal; " in done.stdout and "back: all checks passed" in done.stdout and "command_r" in done.stdout
    losses = runs.read_losses(folder / "outputs")
    assert losses.keys() == set(range(1, 7)) and losses[6] < losses[1] - 0.03
    assert (folder / "outputs" / "losses.csv").read_text().splitlines()[5].startswith("6,")


@pytest.mark.slow
def test_the_script_for_torchrun_trains(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train_mine.py"]
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert runs.read_losses(folder / "torchrun-outputs").keys() == set(range(1, 7))


@pytest.mark.slow
def test_every_layout_has_the_losses_of_one_rank(pools, folder, tmp_path):
    layouts = {
        "one": {},
        "fsdp2 tp2": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "disable_loss_parallel": True},
        "pp2 cp2": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
    }
    losses = {}
    for name, parallelism in layouts.items():
        dump = tmp_path / name
        config = runs.make_config(
            folder / "tokenizer",
            dump,
            flavor="tiny",
            model={"name": "command_r"},
            training={"dataset": "counting", "dataset_path": "20000", "loss": "z_loss", "global_batch_size": 8},
            parallelism=parallelism,
        )
        output = pools[4 if parallelism else 1].run(train_in_a_layout, folder, config)
        assert set(output) == {""}, output
        losses[name] = runs.read_losses(dump)
    for seen in losses.values():
        assert seen.keys() == {1, 2, 3, 4}
        assert all(abs(seen[step] - losses["one"][step]) <= 5e-6 for step in seen), losses


@pytest.mark.parametrize("tied", [True, False])
def test_the_family_is_the_one_of_transformers(pools, folder, tmp_path, tied):
    from transformers import CohereConfig, CohereForCausalLM

    numbers = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = CohereConfig(
        **numbers, vocab_size=97, intermediate_size=56, initializer_range=0.2, logit_scale=0.3, tie_word_embeddings=tied
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CohereForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(97, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    (ours,) = pools[1].run(logits_of, folder, tmp_path / "theirs", tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.tensor(ours), expected, rtol=0, atol=2e-5)

    pools[1].run(convert_there_and_back, folder, tmp_path / "theirs", tmp_path)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = CohereForCausalLM.from_pretrained(tmp_path / "hf").eval()  # config.json too
    with torch.inference_mode():
        assert torch.equal(again(torch.tensor([tokens])).logits[0], expected)


def mixtral_logits(folder, checkpoint, tokens):
    """Case: what the page's Mixtral says to tokens, in the trainer's model, from a checkpoint of any format."""
    import_custom(str(folder / "mine"))
    with open_native(checkpoint) as weights:
        model = get_trainer_family(weights.info.family).build_model(weights.info.args)
        model.load_state_dict({fqn: torch.from_numpy(weights.read(fqn)) for fqn in weights.tensors})
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0].tolist()


def test_the_mixture_of_experts_of_the_page_is_the_one_of_transformers(pools, folder, tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    numbers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = MixtralConfig(**numbers, vocab_size=97, intermediate_size=56, num_local_experts=11, initializer_range=0.2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MixtralForCausalLM(config).eval()
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.mlp.gate.weight)
    model.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(97, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    (ours,) = pools[1].run(mixtral_logits, folder, tmp_path / "theirs", tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.tensor(ours), expected, rtol=0, atol=2e-5)
    pools[1].run(convert_there_and_back, folder, tmp_path / "theirs", tmp_path)
    again = MixtralForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.inference_mode():
        assert torch.equal(again(torch.tensor([tokens])).logits[0], expected)


def test_the_mixture_of_experts_of_the_page_trains(pools, folder, tmp_path):
    config = runs.make_config(
        folder / "tokenizer",
        tmp_path,
        flavor="tiny",
        model={"name": "mixtral"},
        training={"dataset": "counting", "dataset_path": "20000", "global_batch_size": 8},
        parallelism={"pipeline_parallel_degree": 2},
    )
    assert pools[2].run(train_in_a_layout, folder, config) == ["", ""]
    losses = runs.read_losses(tmp_path)
    assert losses[4] < losses[1]
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {f"expert_load/layer_{n}" for n in range(3)} <= record.keys()


SCALED = """
from converters.api import Family, DecoderArgs, hf_config, llama, register_family
from trainer.api import GroupedQueryAttention, Transformer, TrainerFamily, register_model

SCALE = 0.7
CONFIG = hf_config.ConfigClass("Granite", "GraniteForCausalLM", "granite", max_seq_len=64)


class Scaled(GroupedQueryAttention):
    def forward(self, x, rotations):
        from trainer.models.rope import rotate

        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.wq, self.wk, self.wv))
        q, k = (rotate(x, rotations[self.rope_number]) for x in (q, k))
        return self.wo(self.inner_attention(q, k, v, CALL).flatten(-2))


def build_model(args):
    from trainer.models.decoder import TransformerBlock

    class Block(TransformerBlock):
        def forward(self, x, rotations):
            x = x + self.attention(self.attention_norm(x), rotations)
            return x + self.feed_forward(self.ffn_norm(x))

    model = Transformer(args)
    for layer in model.layers.values():
        layer.__class__, layer.attention.__class__ = Block, Scaled
    return model


register_model("granite", TrainerFamily(build_model))
register_family(
    Family(
        name="granite",
        flavors={"tiny": DecoderArgs(32, 2, 4, 2, 8, 64, vocab_size=290, rope_theta=10000.0, max_seq_len=128)},
        parameters=llama.parameters,
        namings={"hf": llama.HF},
        args_from_hf_config=lambda config: hf_config.args_from_hf_config(config, CONFIG),
        hf_config=lambda args: hf_config.hf_config(args, CONFIG),
        hf_architectures=("GraniteForCausalLM",),
    )
)
"""


@pytest.fixture(scope="module", params=[pytest.param("SCALE", marks=pytest.mark.slow), "scale=SCALE"])
def scaled(request, tmp_path_factory):
    """A module whose attention has a scale, and whose layers pass everything by position."""
    module = tmp_path_factory.mktemp("scaled") / f"scaled_by_{'name' if '=' in request.param else 'position'}.py"
    module.write_text(SCALED.replace("CALL", request.param))
    return module


def cached_logits(module, checkpoint, tokens):
    """Case: the logits of each token by way of the cache: of half of them as a prompt, then one by one, in two ways."""
    from titan_tools.infer.decoding.engine import Engine
    from titan_tools.infer.model.load import load_model

    import_custom(str(module))
    with open_native(checkpoint) as weights:
        model = load_model(weights.source, weights.info, dtype=torch.float32, device=torch.device("cpu"))
    half, logits = len(tokens) // 2, []
    for static in (False, True):
        engine = Engine(model, rows=1, room=64, static=static)
        logits.append([engine.prefill(0, tokens[:half]).tolist()])
        logits[-1] += [engine.decode([token])[0].tolist() for token in tokens[half:]]
    return logits


def test_scores_are_scaled_as_transformers_scales_them(pools, scaled, tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    numbers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = GraniteConfig(
        **numbers, vocab_size=97, intermediate_size=64, initializer_range=0.2, attention_multiplier=0.7
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GraniteForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    tokens = torch.randint(97, (32,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, 15:]
    (found,) = pools[1].run(cached_logits, scaled, tmp_path, tokens)
    assert expected.std() > 0.1
    for logits in found:
        torch.testing.assert_close(torch.tensor(logits), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "layout",
    [
        {"parallelism": {"tensor_parallel_degree": 2}},
        {"parallelism": {"context_parallel_degree": 2}},
    ],
    ids=["tp2", "cp2"],
)
def test_a_scale_is_the_same_in_every_layout(pools, data, scaled, tmp_path, layout):
    losses = {}
    for name, sections in {"one": {}, "many": layout}.items():
        config = runs.make_config(data, tmp_path / name, flavor="tiny", model={"name": "granite"}, steps=2, **sections)
        ranks = pools[2 if sections else 1].run(train_with, scaled, config)
        assert set(ranks) == {""}, ranks
        losses[name] = runs.read_losses(tmp_path / name)
    assert losses["one"].keys() == {1, 2}
    assert all(abs(losses["many"][step] - losses["one"][step]) <= 5e-6 for step in (1, 2)), losses


def train_with(module, config):
    """Case: a run with a module imported."""
    import_custom(str(module))
    return runs.run(config)


def test_without_the_import_it_is_reported_what_is_missing(folder, titan, tmp_path, monkeypatch):
    monkeypatch.delenv("TITAN_IMPORT", raising=False)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"architectures": ["CohereForCausalLM"]}')
    save_file({"model.norm.weight": torch.ones(4)}, source / "model.safetensors")
    code, _, err = titan("convert", "hf-to-dcp", source, tmp_path / "out")
    assert code == 2 and "CohereForCausalLM" in err and "try: titan --import MODULE" in err
    code, _, err = titan("--import", folder / "nothing.py", "models")
    assert code == 2 and f"--import {folder / 'nothing.py'}: there is no such file" in err
