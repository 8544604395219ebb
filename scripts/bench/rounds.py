"""Time whole processes in alternation with a reference: medians, their ratios, user CPU seconds and peak memory.

A machine's disk and its neighbours change from minute to minute, so a number alone says little: every round runs the
reference and every command once, one after the other, and only the ratio is judged. Warm-up rounds are not counted.
"""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

TITAN = (sys.executable, "-P", "-m", "titan_tools")
ROOT = Path(__file__).resolve().parents[2]
MIB = 1024**2


@dataclass(slots=True)
class Command:
    """A process to time. `output` is removed before each run; `most` × the reference + `extra_secs` is its limit."""

    name: str
    argv: Sequence[str]
    output: Path
    most: float | None = None
    most_secs: float | None = None  # a limit that does not depend on the reference
    extra_secs: float = 0.3  # start of an interpreter
    most_anon_mib: float | None = None
    most_user_secs: float | None = None
    secs: list[float] = field(default_factory=list)
    user_secs: list[float] = field(default_factory=list)  # of CPU, all its threads and child processes
    anon_mib: float = 0.0  # the largest that was seen of its anonymous memory


def copy_and_fsync(src: Path, dst: Path) -> Command:
    """The reference: `cp -r`, then fsync of every file and of the folder."""
    script = 'cp -r "$0" "$1" && find "$1" -exec sync {} +'
    return Command("cp -r + fsync", ("sh", "-c", script, str(src), str(dst)), dst)


def compare(reference: Command, commands: Sequence[Command], *, rounds: int, warmup: int = 1) -> bool:
    """Run all `warmup` + `rounds` times in alternation, print a table and a line of JSON; True if all limits hold."""
    everything = [reference, *commands]
    for number in range(warmup + rounds):
        for command in everything:
            _say(
                f"round {number + 1 - warmup} of {rounds}: {command.name}"
                if number >= warmup
                else f"warm-up: {command.name}"
            )
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            secs, anon = run(command)
            if number >= warmup:
                command.secs.append(secs)
                command.user_secs.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
            command.anon_mib = max(command.anon_mib, anon)
    results = [_result(command, median(reference.secs)) for command in everything]
    _print_table(results)
    ok = all(result["ok"] for result in results)
    print(json.dumps({"ok": ok, "rounds": rounds, "machine": machine(reference.output), "results": results}))
    return ok


def run(command: Command) -> tuple[float, float]:
    """Seconds of one run and the most anonymous memory (MiB) its process held. Raises SystemExit where it fails."""
    remove(command.output)
    os.sync()  # what others left dirty is not this command's to write
    started = time.perf_counter()
    with subprocess.Popen(command.argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        most = 0
        while process.poll() is None:
            most = max(most, anonymous_bytes(process.pid))
            time.sleep(0.005)
        secs = time.perf_counter() - started
        said = process.stdout.read().decode(errors="replace")
    if process.returncode:
        raise SystemExit(f"{' '.join(command.argv)}\nended with {process.returncode}:\n{said}")
    return secs, most / MIB


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process: what it holds for itself, page cache and mapped libraries left out; 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"RssAnon:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def remove(path: Path) -> None:
    """Remove a file or a folder, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_once(folder: Path) -> None:
    """Bring every file into the page cache."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.read(8 * MIB):
                pass


def machine(place: Path) -> dict[str, Any]:
    """The machine that a measurement was taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(place.parent)], capture_output=True, text=True).stdout.strip()
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3, 1),
        "file_system": kind,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        **({"gpus": gpus} if (gpus := _gpus()) else {}),
    }


def _gpus() -> list[str]:
    """Of each GPU: name, driver, memory, clocks and power limit; empty without nvidia-smi."""
    query = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True)
    except FileNotFoundError:
        return []
    return done.stdout.decode().splitlines()


def _result(command: Command, reference: float) -> dict[str, Any]:
    middle = median(command.secs)
    limit = command.most_secs if command.most is None else command.most * reference + command.extra_secs
    user = median(command.user_secs)
    fits = (
        (limit is None or middle <= limit)
        and (command.most_anon_mib is None or command.anon_mib <= command.most_anon_mib)
        and (command.most_user_secs is None or user <= command.most_user_secs)
    )
    return {
        "name": command.name,
        "median_secs": round(middle, 3),
        "ratio": round(middle / reference, 2),
        "limit_secs": None if limit is None else round(limit, 3),
        "secs": [round(s, 3) for s in command.secs],
        "user_secs": round(user, 2),
        "limit_user_secs": command.most_user_secs,
        "anon_mib": round(command.anon_mib, 1),
        "limit_anon_mib": command.most_anon_mib,
        "ok": fits,
    }


def _print_table(results: Sequence[dict[str, Any]]) -> None:
    columns = ("", "median s", "range", "ratio", "limit s", "user s", "limit", "anon MiB", "limit", "")
    rows = [
        (
            r["name"],
            f"{r['median_secs']:.2f}",
            f"{min(r['secs']):.2f}–{max(r['secs']):.2f}",
            f"{r['ratio']:.2f}",
            "" if r["limit_secs"] is None else f"{r['limit_secs']:.2f}",
            f"{r['user_secs']:.2f}",
            "" if r["limit_user_secs"] is None else f"{r['limit_user_secs']:.1f}",
            f"{r['anon_mib']:.0f}",
            "" if r["limit_anon_mib"] is None else f"{r['limit_anon_mib']:.0f}",
            "ok" if r["ok"] else "TOO MUCH",
        )
        for r in results
    ]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
