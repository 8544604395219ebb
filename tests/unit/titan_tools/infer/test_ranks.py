"""Which GPU is a rank's, under any launcher, and that who starts the ranks takes none for itself."""

import pytest
import torch

from converters.common.errors import ConfigError
from titan_tools.infer import loading, ranks
from titan_tools.infer import run as infer_run
from titan_tools.infer.ranks import check_devices, own_device


@pytest.fixture
def taken(monkeypatch):
    """Eight GPUs that no launcher speaks of; those that are made the current one."""
    taken = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


def launched(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_slurm_starts_ranks_on_several_machines(monkeypatch, taken):
    """srun says which rank of its machine this is, and not how many there are."""
    launched(monkeypatch, RANK="11", WORLD_SIZE="16", SLURM_LOCALID="3")
    check_devices(16)
    assert own_device(16) == torch.device("cuda", 3) and taken == [torch.device("cuda", 3)]


def test_a_rank_without_a_gpu_is_refused(monkeypatch, taken):
    launched(monkeypatch, RANK="11", WORLD_SIZE="16", SLURM_LOCALID="11")
    with pytest.raises(ConfigError, match="rank 11 of this machine has no GPU: torch sees 8"):
        own_device(16)


def test_more_ranks_than_gpus_are_refused_on_all_of_them(monkeypatch, taken):
    with pytest.raises(ConfigError, match="--tp 16 needs 16 GPUs on this machine, which has 8"):
        check_devices(16)
    launched(monkeypatch, RANK="0", WORLD_SIZE="16", LOCAL_RANK="0", LOCAL_WORLD_SIZE="16")
    with pytest.raises(ConfigError, match="--tp 16 needs 16 GPUs"):
        check_devices(16)


def test_one_rank_takes_the_gpu_that_is_its_own(monkeypatch, taken):
    assert own_device(1) == torch.device("cuda", 0)
    launched(monkeypatch, SLURM_LOCALID="2")  # a run of its own in each of srun's tasks
    assert own_device(1) == torch.device("cuda", 2)


def test_who_starts_the_ranks_takes_no_gpu(titan, hf, monkeypatch, taken):
    asked, compilers = [], []
    monkeypatch.setattr(infer_run, "run_ranks", lambda argv, **_: asked.append(argv) or 0)
    monkeypatch.setattr(loading, "check_compiler", compilers.append)
    code, _, err = titan("infer", hf, "--prompt", "a", "--tp", "2", "--compile")
    assert code == 0, err
    assert len(asked) == 1 and taken == [] and compilers == [torch.device("cuda")]


def test_ranks_of_one_machine_are_neighbours(monkeypatch):
    """Containers may share a name, and so may machines."""
    gathered = [("a", "1"), ("a", "2"), ("a", "1"), ("b", "1")]

    def gather(found, own, group):
        found[:] = gathered

    class Group:
        def size(self):
            return len(gathered)

    monkeypatch.setattr(ranks.dist, "all_gather_object", gather)
    assert ranks._ranks_by_machine(Group()) == [[0, 2], [1], [3]]


def test_the_group_of_a_machine_needs_no_other_machine(monkeypatch):
    """torch splits an NCCL group that is bound to a device for every group that a rank names without being in it."""
    asked = []

    def new_group(members, **options):
        asked.append((members, options["backend"], options["use_local_synchronization"]))
        return "group"

    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 2)
    monkeypatch.setattr(ranks.dist, "new_group", new_group)
    assert ranks._machine_group([[0, 1], [2, 3]], "control") == "group"
    assert asked == [([2, 3], "gloo", True)]
    assert ranks._machine_group([[0, 1, 2, 3]], "control") == "control"
