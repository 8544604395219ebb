"""Why a rank cannot join: each problem ends in time, with the address, port or variable. Ranks are threads."""

import socket
import time
from contextlib import closing, nullcontext
from datetime import timedelta
from threading import Thread

import pytest

from converters.common.errors import ConfigError, TitanError
from trainer.ranks import rendezvous, store
from trainer.ranks.rendezvous import LostRank, join_store, launched

SECS = 1


@pytest.fixture(autouse=True)
def shared_stderr(monkeypatch):
    """Threads would take each other's."""
    monkeypatch.setattr(store, "_without_torchs_log", nullcontext)
    monkeypatch.setattr(rendezvous, "_GRACE_SECS", SECS / 4)


@pytest.fixture
def port():
    with closing(socket.create_server(("localhost", 0))) as free:
        return free.getsockname()[1]


def environment(port: int, *, rank: object = 0, world_size: object = 2, **more: str) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()} | more


def join(*environments: dict[str, str], secs: float = SECS) -> list[object]:
    """What each rank gets: a store, or an error. All end in time."""
    found: dict[int, object] = {}

    def rank(number: int) -> None:
        try:
            found[number] = join_store(timedelta(seconds=secs), environments[number])
        except TitanError as error:
            found[number] = error

    threads = [Thread(target=rank, args=(number,), daemon=True) for number in range(len(environments))]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40 * SECS)
    assert len(found) == len(threads) and time.monotonic() - started < 10 * SECS
    return [found[number] for number in range(len(threads))]


def test_ranks_that_are_all_there_meet_at_one_store(port):
    (first, _), (second, own), (third, _) = join(*(environment(port, rank=r, world_size=3) for r in range(3)), secs=30)
    first.set("key", "value")
    assert second.get("key") == third.get("key") == b"value" and (own.rank, own.world_size) == (1, 3)


def test_a_single_rank_may_leave_the_port_to_the_system():
    [(store, own)] = join(environment(0, world_size=1), secs=30)
    assert store.port > 0 and (own.rank, own.world_size) == (0, 1)


def test_outside_of_a_launch_there_are_no_ranks():
    assert launched({"MASTER_ADDR": "somewhere", "LOCAL_RANK": "x"}) is None


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, ["RANK = 'x' is not a number"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK = '-1' is not a number"]),
        ({"RANK": "0"}, ["WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "2"}, ["RANK is not set"]),
        ({"RANK": "0", "WORLD_SIZE": ""}, ["WORLD_SIZE = '' is not a number"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK = 2 is not one of the 2 ranks of WORLD_SIZE"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE = 0 is no number of ranks"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "gpu0"}, ["LOCAL_RANK = 'gpu0' is not a number"]),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            ["LOCAL_RANK = 1 is not one of"],
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "4"}, ["LOCAL_WORLD_SIZE = 4 is more than WORLD_SIZE"]),
        ({"RANK": "a", "WORLD_SIZE": "b"}, ["RANK = 'a' is not a number", "WORLD_SIZE = 'b' is not a number"]),
    ],
)
def test_variables_that_are_wrong_are_named(variables, wrong):
    with pytest.raises(ConfigError) as raised:
        launched(variables)
    assert [text for text in wrong if text not in raised.value.message] == []


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT = '70000' is not a port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT = '0' is not a port"),  # each rank would get another one
        ({"MASTER_PORT": "80x"}, "MASTER_PORT = '80x' is not a port"),
    ],
)
def test_an_address_that_is_missing_is_named(changed, wrong):
    with pytest.raises(ConfigError, match=wrong):
        join_store(timedelta(seconds=SECS), environment(1) | changed)


def test_a_port_that_another_program_uses_is_named_at_once():
    with closing(socket.create_server(("", 0))) as other:
        port, started = other.getsockname()[1], time.monotonic()
        with pytest.raises(ConfigError, match=f"cannot listen on MASTER_PORT = {port}: Address already in use"):
            join_store(timedelta(minutes=5), environment(port, world_size=1))
    assert time.monotonic() - started < 60


def test_a_name_that_does_not_resolve_ends_with_the_timeout(port):
    (error,) = join(environment(port, rank=1) | {"MASTER_ADDR": "no-such-host.invalid"})
    assert isinstance(error, ConfigError) and "MASTER_ADDR = 'no-such-host.invalid'" in error.message
    assert "does not resolve" in error.message


def test_a_name_server_that_does_not_answer_ends_with_the_timeout(port, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: time.sleep(60))
    (error,) = join(environment(port, rank=1))
    assert isinstance(error, ConfigError) and f"MASTER_PORT = {port}: no answer" in error.message


def test_a_port_where_nobody_listens_ends_with_the_timeout(port):
    (error,) = join(environment(port, rank=1))
    assert isinstance(error, ConfigError) and f"MASTER_PORT = {port}: Connection refused" in error.message


def test_a_program_that_is_no_store_ends_with_the_timeout():
    with closing(socket.create_server(("localhost", 0))) as silent:
        (error,) = join(environment(port := silent.getsockname()[1], rank=1))
    assert isinstance(error, ConfigError) and f"MASTER_PORT = {port} is not the store of rank 0" in error.message


def test_a_rank_that_is_missing_is_named_by_all_others(port):
    errors = join(*(environment(port, rank=rank, world_size=3) for rank in (0, 2)))
    assert [type(error) for error in errors] == [LostRank, LostRank]
    assert all("rank 1 of WORLD_SIZE 3 did not join" in error.message for error in errors)
    assert errors[0].exit_code == 3


def test_a_rank_that_is_there_twice_is_named(port):
    errors = join(*(environment(port, rank=rank, world_size=3) for rank in (0, 1, 1)))
    expected = "rank 2 of WORLD_SIZE 3 did not join, and two ranks have RANK = 1"
    assert all(error.message.endswith(expected) for error in errors)


def test_ranks_that_count_differently_are_named(port):
    errors = join(environment(port), environment(port, rank=1, world_size=3), secs=20)
    assert [error.message for error in errors] == ["rank 0 has WORLD_SIZE = 2, rank 1 has 3"] * 2
    assert errors[0].exit_code == 2
