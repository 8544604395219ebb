"""`titan train` as a user runs it: launched by torchrun, killed and started again, preempted, and given wrong input."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.dist.runs import differences, make_data, read_losses, run
from tests.torchtitan_release import write_first_run
from titan_tools.launch import training
from trainer.config.load import load_config
from trainer.ranks.signals import interrupt_answer

ROOT = Path(__file__).resolve().parents[2]
TITAN = [sys.executable, "-P", "-m", "titan_tools"]
CONFIG = """
[job]
dump_folder = "DUMP"
[model]
flavor = "debug_gqa"
hf_assets_path = "DATA"
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
[training]
dataset = "tokens"
dataset_path = "DATA"
local_batch_size = 2
seq_len = 32
steps = STEPS
mixed_precision_param = "float32"
[parallelism]
data_parallel_shard_degree = 2
[checkpoint]
enable = true
interval = 2
keep_latest_k = 0
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
"""


def _environment():
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in ranks} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _start(*arguments, program=TITAN):
    command = [*program, *map(str, arguments)]
    return subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _run(*arguments, program=TITAN):
    process = _start(*arguments, program=program)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def _wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def config(data, tmp_path_factory):
    """A config file, in the folder that it names as its dump folder."""
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "job.toml"
    path.write_text(CONFIG.replace("DUMP", str(folder)).replace("DATA", str(data)).replace("STEPS", "12"))
    return path


@pytest.fixture(scope="module")
def whole(pools, config):
    """The dump folder of the config's run of 12 steps, which was never stopped."""
    assert pools[2].run(run, load_config(str(config), [])) == ["", ""]
    return config.parent


def _saved(dump):
    return [int(path.name.removeprefix("step-")) for path in (dump / "checkpoint").glob("step-*")]


# Steps from the fourth of a process wait: the first SIGTERM ends the wait, a kill the process.
WAITING = """
import signal, time
from trainer.optim.adam import LocalAdam

whole, calls, stops = LocalAdam.step, [], []

def step(*args, **keys):
    if not calls:
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *event: (stops.append(1), before(*event)))
    calls.append(1)
    while len(calls) >= 4 and not stops:
        time.sleep(0.02)
    return whole(*args, **keys)

LocalAdam.step = step
"""


@pytest.mark.slow  # in processes of the tests: tests/faults
def test_killed_then_asked_to_stop_and_started_again_is_the_run_that_was_not(config, whole, tmp_path):
    """Asked by SIGTERM, it saves and leaves with 75. The last start is torchrun's."""
    (tmp_path / "waiting.py").write_text(WAITING)
    waiting = ["train", config, "--job.dump_folder", tmp_path, "--experimental.custom_import", tmp_path / "waiting.py"]
    process = _start(*waiting)
    _wait_for(tmp_path / "checkpoint" / "step-2", process)
    process.kill()  # the parent; its ranks die with it
    process.communicate(timeout=60)
    assert _saved(tmp_path) == [2]

    process = _start(*waiting)
    _wait_for(tmp_path / "checkpoint" / "step-4", process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert err.count("stopped on request after step") == 1 and "Traceback" not in err and "resumed from" in err
    stopped_at = max(_saved(tmp_path))
    assert stopped_at < 12

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    scalars = ("--metrics.enable_tensorboard", "--metrics.save_tb_folder", "scalars")
    program = [*torchrun, "--no-python", *TITAN]
    code, out, err = _run("train", config, "--job.dump_folder", tmp_path, *scalars, program=program)
    assert code == 0 and "resumed from" in err, err
    assert [int(line.split()[1]) for line in out.splitlines()] == list(range(stopped_at + 1, 13))
    assert len(list((tmp_path / "scalars" / tmp_path.name).glob("events.*"))) == 1
    assert read_losses(tmp_path) == read_losses(whole)
    assert differences(tmp_path / "checkpoint" / "step-12", whole / "checkpoint" / "step-12") == []


def _two_nodes(config, dump_folder, *overrides):
    """Two agents of one rank each, as on two machines; smaller ones are in test_nodes.py."""
    with closing(socket.create_server(("localhost", 0))) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    nodes = ("--nnodes", 2, "--rdzv-endpoint", endpoint, "--nproc", 1, "--job.dump_folder", dump_folder)
    return [_start("train", config, *nodes, *overrides) for _ in range(2)]


@pytest.mark.slow
def test_two_nodes_train_as_one_machine(config, whole, tmp_path):
    processes = _two_nodes(config, tmp_path)
    outputs = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert read_losses(tmp_path) == read_losses(whole)
    assert [err.count("mesh         2 ranks on the CPU: dp_shard=2") for err in outputs] in ([0, 1], [1, 0])
    assert all("starting 1 rank of 2, with 2 nodes at localhost:" in err for err in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_is_killed_ends_the_others(config, tmp_path, killed):
    processes = _two_nodes(config, tmp_path, "--training.steps", 1000)
    _wait_for(tmp_path / "checkpoint" / "step-2", processes[killed])
    processes[killed].kill()
    _, err = processes[1 - killed].communicate(timeout=60)
    assert processes[1 - killed].returncode == 3 and err.count("error:") == 1 and "lost a peer" in err, err
    processes[killed].communicate()


SLOW = """
import time
from trainer.optim.adam import LocalAdam

whole = LocalAdam.step

def step(*args, **keys):
    time.sleep(0.3)
    return whole(*args, **keys)

LocalAdam.step = step
"""


def _interrupted(config, tmp_path, *overrides, program=TITAN, presses=1):
    """A run that Ctrl-C interrupts in its third step or later: exit code, output, and its newest step on disk."""
    (tmp_path / "slow.py").write_text(SLOW)
    slow = ("--training.steps", 1000, "--experimental.custom_import", tmp_path / "slow.py")
    checkpoints = ("--checkpoint.interval", 500, "--job.dump_folder", tmp_path)
    process = _start("train", config, *slow, *checkpoints, *overrides, program=program)
    process.stdout.readline(), process.stdout.readline()
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # two that come at once are one
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err or program != TITAN
    return (
        process.returncode,
        [int(line.split()[1]) for line in out.splitlines()],
        err,
        max(_saved(tmp_path), default=0),
    )


ONE_RANK = ("--parallelism.data_parallel_shard_degree", 1)


def test_ctrl_c_saves_at_the_end_of_the_step(config, tmp_path):
    code, steps, err, saved = _interrupted(config, tmp_path, *ONE_RANK)
    assert (code, saved) == (130, steps[-1]) and steps[-1] < 10
    assert err.count(interrupt_answer(saves=True)) == 1
    assert err.endswith(f"error: interrupted after step {saved}, which is saved\ntry: the same command, to resume\n")


@pytest.mark.slow
def test_ctrl_c_without_checkpoints_says_what_is_lost(config, tmp_path):
    code, steps, err, saved = _interrupted(config, tmp_path, *ONE_RANK, "--checkpoint.no_enable")
    assert (code, saved) == (130, 0)
    assert err.count(interrupt_answer(saves=False)) == 1
    assert f"error: interrupted after step {steps[-1]}; nothing was saved, and steps 1 to {steps[-1]} are lost" in err


@pytest.mark.slow
@pytest.mark.parametrize("by_torchrun", [False, True])
def test_ctrl_c_on_many_ranks(config, tmp_path, by_torchrun):
    """torchrun has its own exit code, and prints the traceback of the signal."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    program = (*torchrun, *TITAN) if by_torchrun else TITAN
    code, steps, err, saved = _interrupted(config, tmp_path, program=program)
    assert (code, saved) == (1 if by_torchrun else 130, steps[-1])
    assert err.count(interrupt_answer(saves=True)) == 1 and f"interrupted after step {saved}, which is saved" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.sequence_len", "5"], "training.sequence_len"),
        (["--training.steps", "many"], "training.steps"),
        (["--nproc", "3"], "the mesh needs 2 ranks"),
        (["--parallelism.tensor_parallel_degree", "3"], "does not divide"),
    ],
)
def test_config_errors_are_reported_before_any_rank_starts(titan, config, arguments, message, monkeypatch):
    monkeypatch.setattr(training, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    code, out, err = titan("train", config, *arguments)
    assert (code, out) == (2, "")
    assert message in err and err.count("error:") == 1


def test_a_seed_checkpoint_is_made_once(titan, config, tmp_path):
    code, out, err = titan("seed", config, tmp_path / "seed", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert (report["num_files"], report["mesh"], report["num_parameters"]) == (2, "dp_shard=2", 1_311_872)
    code, _, err = titan("seed", config, tmp_path / "seed")
    assert code == 2 and "exists already" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe_debug", "gpt_oss_debug", "llama4_debug_model"])
def test_torchtitans_file_for_experts_trains_with_them_on_one_rank_or_two(tmp_path, monkeypatch, name):
    """Two steps of 316, 183 or 15 million parameters, with short sequences: as the file is, and with ep 2."""
    file = f"{name}.toml"
    write_first_run(tmp_path)  # for tokenizer and text
    shutil.copy(ROOT / "tests/unit/trainer/config/configs" / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    ep2 = "--parallelism.expert_parallel_degree=2"
    code, out, err = _run("config", "check", file)
    assert code == 0 and "fine on 1 rank" in out, err
    code, out, err = _run("train", file, "--dry-run", "--world-size=8", ep2)
    assert code == 0 and "efsdp 4 × ep 2 × etp 1" in out, err
    losses = {}
    for layout, words in {"one": (), "two": ("--nproc=2",), "ep 2": ("--nproc=2", ep2)}.items():
        cut = ("--training.seq_len=64", "--training.local_batch_size=2", "--training.steps=2", "--metrics.log_freq=1")
        code, out, err = _run("train", file, *cut, *words, f"--job.dump_folder={layout}")
        assert code == 0, err
        losses[layout] = read_losses(tmp_path / layout)
        assert set(losses[layout]) == {1, 2}
    # The same samples and experts, wherever these are: equal up to bf16
    assert losses["ep 2"] == pytest.approx(losses["two"], rel=1e-3)


@pytest.mark.slow
def test_torchtitans_first_run_starts(tmp_path, monkeypatch):
    config = write_first_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = _run("config", "check", config.name)
    assert code == 0 and "fine on 1 rank" in out, err
    code, out, err = _run("train", config.name, "--training.seq_len=128", "--training.steps=4", "--checkpoint.enable")
    assert code == 0, err
    assert "their ids, as in transformers: <|begin_of_text|> 263, <|end_of_text|> 264" in err
    assert "has no token for 162 of the 256 bytes, the space among them" in err
    assert "reading tests/assets/c4_test, as torchtitan does" in err
    assert len(read_losses(tmp_path / "outputs")) == 4
    code, out, err = _run("infer", "outputs", "--prompt", "the other", "--max-new-tokens", "4")
    assert code == 0, err
