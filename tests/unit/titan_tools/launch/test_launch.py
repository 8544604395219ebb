"""The launch record, and the options of `titan train` about several nodes."""

import pytest
from typer.testing import CliRunner

from converters.common.errors import ConfigError
from titan_tools.cli import app
from titan_tools.launch import training
from titan_tools.launch.launch import Launch, NodeOptions, Rendezvous

ENDPOINT = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500")


@pytest.mark.parametrize(
    ("endpoint", "host", "port", "text"),
    [
        ("node0:29500", "node0", 29500, "node0:29500"),
        ("10.0.0.7:1", "10.0.0.7", 1, "10.0.0.7:1"),
        ("head.cluster.local", "head.cluster.local", 29400, "head.cluster.local:29400"),  # torchrun's port
        ("[fd00::7]:29500", "fd00::7", 29500, "[fd00::7]:29500"),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint, host, port, text):
    place = Rendezvous.parse(endpoint, timeout_secs=5)
    assert (place.host, place.port, place.timeout_secs, str(place)) == (host, port, 5, text)


@pytest.mark.parametrize("endpoint", ["", ":29500", "node0:", "node0:x", "node0:0", "node0:65536", "fd00::7", "a b:1"])
def test_other_endpoints_are_refused(endpoint):
    with pytest.raises(ConfigError, match="is not an address HOST:PORT"):
        Rendezvous.parse(endpoint, timeout_secs=5)


def test_the_ranks_of_a_job_are_those_of_all_nodes():
    assert Launch(("train", "debug"), nproc=8, nodes=4).world_size == 32


@pytest.mark.parametrize(
    ("options", "given", "missing"),
    [
        (NodeOptions(nodes=2), "--nnodes 2", "--rdzv-endpoint HOST:PORT"),
        (NodeOptions(endpoint="node0:1"), "--rdzv-endpoint node0:1", "--nnodes N"),
    ],
)
def test_one_option_needs_the_other(options, given, missing):
    with pytest.raises(ConfigError) as raised:
        options.rendezvous(5)
    assert raised.value.message.startswith(f"{given} needs {missing}")


def test_one_machine_needs_no_rendezvous():
    assert NodeOptions(nproc=4).rendezvous(5) is None


def _train(*arguments):
    return CliRunner().invoke(app, ["train", "debug", *arguments]).exception


def test_inside_a_launch_the_options_are_refused_with_both_named(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    error = _train(*ENDPOINT)
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert error.message == (
        "--nnodes 2 --rdzv-endpoint node0:29500 in a rank that torchrun or a scheduler has started already:"
        " RANK = 1, WORLD_SIZE = 4"
    )


def test_a_dry_run_starts_no_nodes():
    assert "--nnodes 2 --rdzv-endpoint node0:29500 with --dry-run" in _train("--dry-run", *ENDPOINT).message


def test_the_layout_is_that_of_all_nodes(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "run_ranks", lambda launch, **_: pytest.fail("ranks were started"))
    monkeypatch.delenv("RANK", raising=False)
    error = _train("--nnodes", "3", "--rdzv-endpoint", "node0", "--nproc", "2")
    assert "the mesh needs 8 ranks" in error.message and "but there are 6" in error.message
    assert error.tries == ("--nnodes × --nproc = 8",)
