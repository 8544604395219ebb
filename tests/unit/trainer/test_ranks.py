"""Which GPU is whose: told by the launcher, checked against what torch sees."""

import pytest
import torch

from converters.errors import ConfigError
from trainer.ranks import own_gpu


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)


def test_torchruns_number_comes_before_slurms(monkeypatch):
    monkeypatch.setenv("SLURM_LOCALID", "0")
    assert own_gpu() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_gpu() == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("number", "told"),
    [(None, "does not say which GPU"), ("-1", "does not say which GPU"), ("2", "rank 2 .* no GPU: torch sees 2")],
)
def test_a_rank_without_a_gpu_of_its_own_is_told(monkeypatch, number, told):
    if number is not None:
        monkeypatch.setenv("LOCAL_RANK", number)
    with pytest.raises(ConfigError, match=told):
        own_gpu()
