"""The GPUs of this machine, and the number of ranks that is started on it."""

import pytest
import torch

from converters.common.errors import ConfigError
from titan_tools.launch import devices
from titan_tools.launch.devices import count_gpus
from titan_tools.launch.training import ranks_per_node


def test_gpus_are_counted_unless_absent_or_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(devices, "Path", lambda place: tmp_path)  # for /dev
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert count_gpus() == 0
    for name in ("nvidia3", "kfd", "dxg"):
        (tmp_path / name).touch()
        assert count_gpus() == 4, name
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert count_gpus() == 0
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("asked", "needed", "num_gpus", "nodes", "expected"),
    [
        (None, 4, 8, 1, 8),  # all GPUs
        (3, 4, 8, 2, 3),
        (None, 4, 0, 1, 4),  # without GPUs as many as the degrees need
        (None, 4, 0, 2, 2),
        (None, 5, 0, 2, 3),  # too many: the layout says what fits
        (None, 16, 8, 2, 8),
    ],
)
def test_ranks_of_a_node(asked, needed, num_gpus, nodes, expected):
    assert ranks_per_node(asked, needed, num_gpus=num_gpus, nodes=nodes) == expected


@pytest.mark.parametrize(("asked", "nodes", "fitting"), [(None, 2, 16), (9, 1, 8)])
def test_more_ranks_than_gpus_on_a_node_are_refused(asked, nodes, fitting):
    with pytest.raises(ConfigError, match="9 ranks, but 8 GPUs on this machine") as raised:
        ranks_per_node(asked, 18, num_gpus=8, nodes=nodes)
    assert raised.value.tries[0].endswith(f"that need {fitting}")
