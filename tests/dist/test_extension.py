"""docs/extend.md is true: its package, made outside of titan, is built and used step by step, and prints what it says.

Families from outside (the page's, Mixtral and Command R) are ones that transformers has: logits are compared with its.
"""

import hashlib
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
from trainer.config.custom_import import import_custom
from trainer.models.registry import get_trainer_family

ROOT = Path(__file__).resolve().parents[2]
PAGE, REFERENCE = ((ROOT / "docs" / name).read_text() for name in ("extend.md", "extend_reference.md"))
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
COMMAND_R, MIXTRAL = (ROOT / "tests" / "models" / f"{name}.py" for name in ("command_r", "mixtral"))
RUN_ALL = """
import json, os, runpy, sys
from titan_tools import cli
before = dict(os.environ)
for command in json.loads(sys.argv[1]):
    sys.argv = command
    os.environ.clear()
    os.environ.update(before)  # each as in a process of its own
    print("$", flush=True)
    if command[0] == "python":
        exec(command[2]) if command[1] == "-c" else runpy.run_path(command[1], run_name="__main__")
    elif code := cli.run():
        sys.exit(f"{command} ended with {code}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the page was followed, one step after the other, and the commands of the reference."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "titan.json").write_text(json.dumps(_product_files()))
    for kind, title, text in FENCE.findall(PAGE + REFERENCE):
        if title:
            (folder / title).parent.mkdir(exist_ok=True)
            with (folder / title).open("a") as file:  # `__init__.py` gets a line in each step
                file.write(text)
        elif kind == "console":
            _run_and_compare(folder, text)
    return folder


def _run_and_compare(folder, text):
    """Run the commands of a step and compare what they print; `…` stands for anything, a line of it for lines."""
    first, *steps = re.split(r"^\$ (.*)\n", text, flags=re.M)
    assert not first
    commands = [shlex.split(command) for command in steps[::2]]
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN_ALL, json.dumps(commands)],
        cwd=folder,
        env=_environment() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    for command, expected, output in zip(steps[::2], steps[1::2], done.stdout.split("$\n")[1:], strict=True):
        lines = (
            r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + r"\n"
            for line in expected.splitlines()
        )
        assert re.fullmatch("".join(lines), output), f"{command} printed\n{output}"


def _environment():
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in ranks} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def train_with(module, config):
    """Case: a run with a module imported."""
    import_custom(str(module))
    return runs.run(config)


def train_with_command_r(folder, config):
    """Case: a run of Command R with the page's data and loss."""
    import_custom(str(COMMAND_R))
    return train_with(folder / "mine", config)


def logits_of(module, checkpoint, tokens):
    """Case: the logits of a module's family, from a checkpoint of any format."""
    from titan_tools.infer.model.load import load_model

    import_custom(str(module))
    with open_native(checkpoint) as weights:
        model = load_model(weights.source, weights.info, dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        return model.head(model.body(torch.tensor([tokens])))[0].tolist()


def convert_there_and_back(module, source, destination):
    """Case: Hugging Face to DCP and back."""
    from tests.doors import convert

    import_custom(str(module))
    convert(source, destination / "dcp", to="dcp")
    convert(destination / "dcp", destination / "hf", to="hf")


def test_the_steps_of_the_page_leave_what_they_say(folder):
    losses = runs.read_losses(folder / "counted")
    assert losses.keys() == set(range(1, 7)) and losses[6] < losses[1] - 0.03
    assert (folder / "counted" / "losses.csv").read_text().splitlines()[5].startswith("6,")
    one, two = (runs.read_losses(folder / name) for name in ("denoised", "on-two-ranks"))
    assert one.keys() == two.keys() and all(abs(one[step] - two[step]) <= 1e-6 for step in one)
    assert one[20] < one[1] - 0.2


def test_the_package_needs_no_change_of_titan(folder):
    """A family, container, format, store, objective, renderer, dataset, loss and sink: no file of titan changes."""
    assert len([*(folder / "mine").glob("*.py")]) == 8
    assert _product_files() == json.loads((folder / "titan.json").read_text())
    assert len(PAGE.splitlines()) <= 620


def _product_files():
    files = (path for name in ("converters", "trainer", "titan_tools") for path in (ROOT / name).rglob("*.py"))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


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
        output = pools[4 if parallelism else 1].run(train_with_command_r, folder, config)
        assert set(output) == {""}, output
        losses[name] = runs.read_losses(dump)
    for seen in losses.values():
        assert seen.keys() == {1, 2, 3, 4}
        assert all(abs(seen[step] - losses["one"][step]) <= 5e-6 for step in seen), losses


@pytest.mark.parametrize(
    ("called", "settings"),
    [
        ("Qwen2", {"tie_word_embeddings": False}),
        ("Cohere", {"logit_scale": 0.3, "tie_word_embeddings": True}),
        ("Cohere", {"logit_scale": 0.3, "tie_word_embeddings": False}),
    ],
    ids=["the page's Qwen 2", "Command R, tied", "Command R"],
)
def test_a_family_from_outside_is_the_one_of_transformers(pools, folder, tmp_path, called, settings):
    import transformers

    module = COMMAND_R if called == "Cohere" else folder / "mine"
    numbers = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = getattr(transformers, f"{called}Config")(**numbers, vocab_size=97, intermediate_size=56, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{called}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(97, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    (ours,) = pools[1].run(logits_of, module, tmp_path / "theirs", tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.tensor(ours), expected, rtol=0, atol=2e-5)

    pools[1].run(convert_there_and_back, module, tmp_path / "theirs", tmp_path)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = type(model).from_pretrained(tmp_path / "hf").eval()  # config.json too
    with torch.inference_mode():
        assert torch.equal(again(torch.tensor([tokens])).logits[0], expected)


def mixtral_logits(checkpoint, tokens):
    """Case: the logits of the trainer's Mixtral, from a checkpoint of any format."""
    import_custom(str(MIXTRAL))
    with open_native(checkpoint) as weights:
        model = get_trainer_family(weights.info.family).build_model(weights.info.args)
        model.load_state_dict({fqn: torch.from_numpy(weights.read(fqn)) for fqn in weights.tensors})
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0].tolist()


def test_mixtral_from_outside_is_the_one_of_transformers(pools, tmp_path):
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
    (ours,) = pools[1].run(mixtral_logits, tmp_path / "theirs", tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.tensor(ours), expected, rtol=0, atol=2e-5)
    pools[1].run(convert_there_and_back, MIXTRAL, tmp_path / "theirs", tmp_path)
    again = MixtralForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.inference_mode():
        assert torch.equal(again(torch.tensor([tokens])).logits[0], expected)


def test_mixtral_from_outside_trains(pools, data, tmp_path):
    config = runs.make_config(
        data, tmp_path, flavor="tiny", model={"name": "mixtral"}, parallelism={"pipeline_parallel_degree": 2}
    )
    assert pools[2].run(train_with, MIXTRAL, config) == ["", ""]
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


def test_without_the_import_it_is_reported_what_is_missing(titan, tmp_path, monkeypatch):
    monkeypatch.delenv("TITAN_IMPORT", raising=False)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"architectures": ["CohereForCausalLM"]}')
    save_file({"model.norm.weight": torch.ones(4)}, source / "model.safetensors")
    code, _, err = titan("convert", "hf-to-dcp", source, tmp_path / "out")
    assert code == 2 and "CohereForCausalLM" in err and "try: titan --import MODULE" in err
    code, _, err = titan("--import", tmp_path / "nothing.py", "models")
    assert code == 2 and f"--import {tmp_path / 'nothing.py'}: there is no such file" in err
