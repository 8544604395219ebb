"""Memory that this machine, and the cgroups of this process, leave."""

from pathlib import Path

import pytest

from trainer.ranks import machine


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes files of a machine with 1,000 KiB available: `system(cgroups, path=content, …)`."""
    meminfo, own, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "sys"
    meminfo.write_text("MemTotal:  4000 kB\nMemFree:  10 kB\nMemAvailable:    1000 kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", meminfo)
    monkeypatch.setattr(machine, "_OWN_CGROUPS", own)
    files = {
        version: (root / Path(folder).relative_to("/sys/fs/cgroup"), *names)
        for version, (folder, *names) in machine._FILES.items()
    }
    monkeypatch.setattr(machine, "_FILES", files)

    def write(cgroups: str, **contents: str) -> None:
        own.write_text(cgroups)
        for path, content in contents.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)

    write.meminfo = meminfo  # type: ignore[attr-defined]
    return write


def test_a_machine_without_limits(system):
    system("0::/user.slice\n", **{"user.slice/memory.max": "max\n", "user.slice/memory.current": "5\n"})
    assert machine.available_bytes() == 1000 * 1024


def test_the_tightest_of_nested_cgroups_of_version_2(system):
    """What a process has cached of files is given back; what it has in a tmpfs is not."""
    files = {
        "job/memory.max": "9000\n",
        "job/memory.current": "8000\n",
        "job/memory.stat": "anon 1\nshmem 600\ninactive_file 250\nactive_file 40\nslab_reclaimable 3\n",
        "job/step/memory.max": "5000\n",
        "job/step/memory.current": "100\n",
        "job/step/memory.stat": "inactive_file 0\n",
    }
    system("0::/job/step\n", **files)
    assert machine.available_bytes() == 9000 - 8000 + 293


def test_a_container_that_sees_its_own_cgroup_as_the_root(system):
    system("0::/outside/pod\n", **{"memory.max": "7000\n", "memory.current": "6000\n", "memory.stat": "anon 6000\n"})
    assert machine.available_bytes() == 1000


def test_cgroups_of_version_1(system):
    files = {
        "memory/slurm/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/slurm/memory.usage_in_bytes": "700\n",
        "memory/slurm/memory.stat": "total_inactive_file 0\n",
        "memory/slurm/job/memory.limit_in_bytes": "900\n",
        "memory/slurm/job/memory.usage_in_bytes": "700\n",
        "memory/slurm/job/memory.stat": "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 4\n",
    }
    system("5:cpu,cpuacct:/slurm\n4:memory:/slurm/job\n1:name=systemd:/\n", **files)
    assert machine.available_bytes() == 224


def test_a_limit_that_is_exceeded_leaves_nothing(system):
    system("0::/\n", **{"memory.max": "100\n", "memory.current": "150\n", "memory.stat": "anon 150\n"})
    assert machine.available_bytes() == 0


def test_a_system_that_does_not_say_refuses_nothing(system):
    system.meminfo.unlink()
    assert machine.available_bytes() is None
