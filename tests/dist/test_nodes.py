"""Agents of several nodes, as processes on this machine: they meet, or say in time which of them is missing."""

import json
import os
import re
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch.distributed as dist

from converters.common.errors import ConfigError, TitanError
from tests.dist.pool import FORK_SERVER
from titan_tools.launch import nodes
from titan_tools.launch.launch import Launch, Rendezvous, environment_of_ranks
from titan_tools.launch.nodes import join_nodes
from trainer.config.sections import Config, Optimizer, Training
from trainer.job.same_config import require_same_config
from trainer.ranks.rendezvous import CannotJoin, LostRank

ROOT = Path(__file__).resolve().parents[2]
ENOUGH_SECS = 120
RANK = """
import json, os, sys, time
from pathlib import Path
from converters.common.errors import NumericalFault
from titan_tools.launch.rank import rank_errors
folder, names = Path(__file__).parent, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
with rank_errors():
    rank, world_size, local_rank, local_size, group_rank = (int(os.environ[name]) for name in names)
    (folder / f"rank-{rank}").write_text(json.dumps([world_size, local_rank, local_size, group_rank, os.getppid()]))
"""


@pytest.fixture
def port():
    with closing(socket.create_server(("localhost", 0))) as free:
        return free.getsockname()[1]


class Agents:
    """Agents in processes of their own, forked from a server that has imported torch."""

    def __init__(self, folder, port):
        self.folder, self.port, self.processes = folder, port, []

    def start(self, *, num_nodes=2, nproc=1, secs=ENOUGH_SECS, body="", command=()):
        number = len(self.processes)
        program = self.folder / "rank.py"
        if not program.exists():
            program.write_text(RANK + "".join(f"    {line}\n" for line in body.splitlines()))
        place = Rendezvous("localhost", self.port, secs)
        launch = Launch(command, nproc, num_nodes, place, environment_of_ranks(nproc), ("-P", str(program)))
        process = FORK_SERVER.Process(target=_run_agent, args=(launch, self.folder / f"agent-{number}"), daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def results(self):
        """Exit code and message of each agent."""
        for process in self.processes:
            process.join(ENOUGH_SECS)
            assert process.exitcode is not None, "an agent has not ended"
        return [json.loads((self.folder / f"agent-{n}").read_text()) for n in range(len(self.processes))]

    def wait_for(self, name):
        self.wait_until((self.folder / name).exists)

    def wait_until(self, is_true):
        until = time.monotonic() + ENOUGH_SECS
        while not is_true():
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.fixture
def agents(tmp_path, port):
    agents = Agents(tmp_path, port)
    yield agents
    for process in agents.processes:
        process.kill()
        process.join()


def _run_agent(launch, result):
    from titan_tools.launch.agent import run_ranks

    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        ended = [run_ranks(launch), ""]
    except TitanError as error:
        ended = [error.exit_code, error.message]
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(ended))
    partial.rename(result)


def test_ranks_of_all_nodes_are_one_job_and_the_host_has_the_first(agents):
    hosts = agents.start(num_nodes=2, nproc=2)
    agents.wait_until(lambda: _answers(agents.port))
    other = agents.start(num_nodes=2, nproc=2)
    assert agents.results() == [[0, ""], [0, ""]]
    ranks = [json.loads((agents.folder / f"rank-{rank}").read_text()) for rank in range(4)]
    assert [rank[:4] for rank in ranks] == [[4, 0, 2, 0], [4, 1, 2, 0], [4, 0, 2, 1], [4, 1, 2, 1]]
    assert [rank[4] for rank in ranks] == [hosts.pid] * 2 + [other.pid] * 2


def _host_of(agents):
    """The process id of the agent that hosts the store: the parent of the first rank."""
    return json.loads((agents.folder / "rank-0").read_text())[4]


def test_a_node_that_never_comes_is_counted_with_the_address(agents):
    agents.start(num_nodes=3, secs=3)
    agents.start(num_nodes=3, secs=3)
    results = agents.results()
    # The node whose timeout comes first ends the waiting of the other
    expected = (
        rf"2 of 3 nodes (joined within 3 s|were there when one of them ended), at localhost:{agents.port}: \S+, \S+"
    )
    assert [code for code, _ in results] == [3, 3] and all(re.fullmatch(expected, message) for _, message in results)
    assert any("joined within 3 s" in message for _, message in results)


@pytest.mark.slow
def test_a_node_that_is_too_many_ends_at_once_and_the_others_go_on(agents):
    body = "while not (folder / 'go').exists(): time.sleep(0.02)"
    agents.start(body=body), agents.start(body=body)
    agents.wait_for("rank-0"), agents.wait_for("rank-1")
    agents.start().join(ENOUGH_SECS)
    (agents.folder / "go").touch()
    *results, (code, message) = agents.results()
    assert results == [[0, ""], [0, ""]]
    assert (code, message) == (3, f"all 2 nodes are at localhost:{agents.port} already, and this one is too many")


def test_nodes_that_were_started_differently_are_named_on_all(agents):
    agents.start(num_nodes=2, command=("train", "a")), agents.start(num_nodes=3, nproc=2, command=("train", "b"))
    for code, message in agents.results():
        assert code == 2 and "were started with different options" in message
        assert "titan train a --nnodes 2 --nproc 1" in message and "titan train b --nnodes 3 --nproc 2" in message


def test_a_node_ends_with_its_own_error_after_the_host_of_the_store_has_ended(agents):
    """Ranks of one error end within moments of each other; the others' agent must not ask the store between."""
    body = """if rank:
    while not (folder / "ended").exists(): time.sleep(0.02)
raise NumericalFault("loss is nan")"""
    first, second = agents.start(body=body), agents.start(body=body)
    agents.wait_for("rank-0"), agents.wait_for("rank-1")
    hosts = {process.pid: process for process in (first, second)}[_host_of(agents)]
    hosts.join(ENOUGH_SECS)
    time.sleep(2)  # torch's handler asks the store once a second
    (agents.folder / "ended").touch()
    assert agents.results() == [[4, "loss is nan"], [4, "loss is nan"]]


def test_a_stop_request_ends_the_waiting_for_other_nodes(agents, tmp_path):
    process = agents.start()
    agents.wait_until(lambda: _answers(agents.port))
    time.sleep(1)
    os.kill(process.pid, signal.SIGTERM)
    assert agents.results() == [[75, "stopped on request while starting: there was nothing to save yet"]]


def _answers(port):
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        return False
    return True


def _join(port, host="localhost", secs=1):
    join_nodes(Launch((), 1, 2, Rendezvous(host, port, secs)))


def test_an_address_that_nobody_answers_at_is_named_with_the_count(port, monkeypatch):
    monkeypatch.setattr(nodes, "_is_own", lambda host: False)
    with pytest.raises(LostRank) as raised:
        _join(port)
    assert raised.value.exit_code == 3
    assert f"--rdzv-endpoint localhost:{port} within 1 s: Connection refused; 1 of 2 nodes" in raised.value.message


def test_a_name_that_does_not_resolve_is_named(port):
    with pytest.raises(CannotJoin, match=r"no-such-host.invalid:\d+ within 1 s: the name does not resolve") as raised:
        _join(port, "no-such-host.invalid")
    assert raised.value.exit_code == 2


def test_a_port_that_another_program_uses_is_named():
    with closing(socket.create_server(("localhost", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(CannotJoin, match=f"what listens at --rdzv-endpoint localhost:{port} is not the store"):
            _join(port)


def test_addresses_of_this_machine_are_known():
    assert nodes._is_own("localhost") and nodes._is_own("127.0.0.1") and nodes._is_own(socket.gethostname())
    assert not nodes._is_own("192.0.2.7") and not nodes._is_own("no-such-host.invalid")


def _compare_configs(learning_rates, paths):
    rank = dist.get_rank()
    config = Config(optimizer=Optimizer(lr=learning_rates[rank]), training=Training(dataset_path=paths[rank]))
    try:
        require_same_config(config, dist.group.WORLD)
    except ConfigError as error:
        return error.message
    return ""


def test_ranks_that_read_different_configs_are_refused(pools):
    assert pools[2].run(_compare_configs, [1e-3, 1e-3], ["/a", "/b"]) == ["", ""]  # copies on each machine
    expected = "ranks have different configs:\n  optimizer.lr: 0.001 on rank 0, 0.002 on rank 1"
    assert pools[2].run(_compare_configs, [1e-3, 2e-3], ["/a", "/b"]) == [expected] * 2
