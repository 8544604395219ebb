"""The collector works when it is reported to, on every rank at the same step, and at no other time."""

import gc

import pytest

from trainer.runtime import GarbageCollection


class Node:
    """One half of a reference cycle."""

    num_alive = 0

    def __init__(self):
        Node.num_alive += 1
        self.other = None

    def __del__(self):
        Node.num_alive -= 1


def make_cycle():
    a, b = Node(), Node()
    a.other, b.other = b, a


def test_it_collects_every_few_steps_and_is_off_between(capsys):
    assert gc.isenabled()
    with GarbageCollection(3, debug=False) as garbage:
        assert not gc.isenabled()
        alive = []
        for step in range(1, 7):
            make_cycle()
            garbage.collect(step)
            alive.append(Node.num_alive)
        assert alive == [2, 4, 0, 2, 4, 0]
    assert gc.isenabled() and capsys.readouterr().err == ""


def test_it_is_on_again_after_an_error():
    with pytest.raises(KeyError), GarbageCollection(3, debug=False):
        raise KeyError
    assert gc.isenabled()


def test_debugging_collects_after_each_step_and_counts(capsys):
    with GarbageCollection(100, debug=True) as garbage:
        garbage.collect(1)
        capsys.readouterr()
        make_cycle()
        garbage.collect(2)
        assert Node.num_alive == 0
        found = capsys.readouterr().err
        garbage.collect(3)
        assert capsys.readouterr().err.startswith("step 3: 0 objects")
    assert found.startswith("step 2: ") and int(found.split()[2]) >= 2
