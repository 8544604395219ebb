"""What torch's own CUDA allocator answers, without a GPU: its compiled code, run over a CUDA runtime that only counts.

`python -m tests.recorded_allocator.record SITE_PACKAGES...` writes recorded.txt anew: each SITE_PACKAGES has torch for
CUDA 13 and its nvidia packages, and all must answer alike; needs gcc, g++ and nm.
"""

import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.txt"
MIB = 1 << 20

# The compiler's own headers of CUDA are in no package of torch's: what the runtime's header needs of them
_EMPTY = ["CUDARTAPI", "CUDARTAPI_CDECL", "__device_builtin__", "__cudart_builtin__", "__host__", "__device__"]
_EMPTY += ["__device_builtin_texture_type__", "__device_builtin_surface_type__"]
_HOST_DEFINES = [f"#define {name}" for name in _EMPTY]
_HOST_DEFINES += ["#define __align__(n) __attribute__((aligned(n)))", "#define __builtin_align__(n) __align__(n)"]


def build(site_packages: Path, folder: Path) -> None:
    """Compile the fake runtime and the program that asks, against an installed torch, into `folder`."""
    library = site_packages / "torch/lib/libc10_cuda.so"
    listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    soname = re.search(r"libcudart\.so\.\d+", listed.stdout)[0]
    source = (HERE / "fake_cuda.c").read_text()
    unused = [name for name in re.findall(r" (cuda\w+)@", listed.stdout) if f"{name}(" not in source]
    aborting = "".join(f'void {name}() {{ fputs("{name} is not faked\\n", stderr); abort(); }}\n' for name in unused)
    (folder / "crt").mkdir()
    (folder / "crt/host_defines.h").write_text("\n".join(_HOST_DEFINES) + "\n")
    (folder / "cuda_runtime.h").write_text("#include <cuda_runtime_api.h>\n")
    (folder / "unused.c").write_text("#include <stdio.h>\n#include <stdlib.h>\n" + aborting)
    (folder / "versions").write_text(f"{soname} {{ global: *; }};")
    of_cuda = site_packages.glob("nvidia/cu1*/include")
    headers = [f"-I{path}" for path in (folder, site_packages / "torch/include", *of_cuda)]
    runtime = folder / "libcudart.so"
    made = [f"-Wl,--version-script={folder}/versions", f"-Wl,-soname,{soname}", "-o", runtime]
    _run("gcc", "-shared", "-fPIC", "-w", *headers, HERE / "fake_cuda.c", folder / "unused.c", *made)
    nvml = ["-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libnvml.so"]
    _run("gcc", "-shared", "-fPIC", "-w", HERE / "fake_nvml.c", *nvml)
    libraries = [f"-L{library.parent}", f"-Wl,-rpath,{library.parent}", "-lc10_cuda", "-lc10", runtime]
    _run("g++", "-std=c++20", "-w", *headers, HERE / "ask.cpp", *libraries, "-o", folder / "ask")


def ask(folder: Path, events: Iterable[str], *, allocator: str, capacity_bytes: int | None) -> list[str]:
    """The answers of torch's allocator to events; see ask.cpp."""
    environment = os.environ | {"LD_PRELOAD": f"{folder}/libcudart.so:{folder}/libnvml.so"}
    environment["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{allocator == 'expandable'}"
    if capacity_bytes:
        environment["FAKE_TOTAL_BYTES"] = str(capacity_bytes)
    asked = subprocess.run(
        [folder / "ask"], input="\n".join(events), capture_output=True, text=True, check=True, env=environment
    )
    return asked.stdout.splitlines()


def make_events(seed: int, *, num: int, budget_bytes: int) -> list[str]:
    """Requests like a train step's: few sizes, most again and again, waves of allocating and freeing, three streams."""
    chance = random.Random(seed)
    sizes = [1, 512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB, 20 * MIB - 1536, 20 * MIB]
    sizes += [int(2 ** chance.uniform(8, 28)) for _ in range(12)]
    events, live, held, grows = [], [], 0, True
    for number in range(num):
        if held > budget_bytes:
            grows = False
        elif not live or held < budget_bytes * chance.random() * 0.6:
            grows = True
        if live and chance.random() < (0.35 if grows else 0.7):
            freed, size = live.pop(chance.randrange(len(live)) if chance.random() < 0.5 else -1)
            held -= size
            events.append(f"f {freed}")
        else:
            size = chance.choice(sizes) if chance.random() < 0.8 else chance.randint(1, 60 * MIB)
            events.append(f"a {number} {size} {chance.choice((0, 0, 0, 1, 2))}")
            live.append((number, size))
            held += size
    return events


def record(site_packages: Path) -> list[str]:
    """The lines of recorded.txt: which torch, then per recording a title, and each event with its answer."""
    version = re.search(r"__version__ = '(.*)'", (site_packages / "torch/version.py").read_text())[1]
    lines = [f"# torch {version}"]
    with tempfile.TemporaryDirectory() as name:
        build(site_packages, Path(name))
        for seed, capacity_mib in enumerate((0, 0, 900, 500)):
            events = make_events(seed, num=300, budget_bytes=1200 * MIB)
            for allocator in ("classic", "expandable"):
                lines.append(f"= {allocator} {capacity_mib}")
                lines += _without_failed(Path(name), events, allocator=allocator, capacity_bytes=capacity_mib * MIB)
    return lines


def main(all_site_packages: Iterable[str]) -> None:
    """Record anew. Raises ValueError if two versions of torch do not agree."""
    versions, answers = zip(*((first, rest) for first, *rest in map(record, map(Path, all_site_packages))), strict=True)
    if any(answer != answers[0] for answer in answers):
        raise ValueError(f"{versions} do not agree")
    title = [*versions, "# event; allocated, reserved, address"]
    RECORDED.write_text("\n".join([*title, *answers[0]]) + "\n")


def _without_failed(folder: Path, events: list[str], *, allocator: str, capacity_bytes: int) -> list[str]:
    """Recorded lines; what did not fit is not freed."""
    while True:
        answers = ask(folder, events, allocator=allocator, capacity_bytes=capacity_bytes)
        failed = {event.split()[1] for event, answer in zip(events, answers, strict=False) if answer.endswith(" 0")}
        kept = [event for event in events if event[0] == "a" or event.split()[1] not in failed]
        if kept == events:
            return [f"{event}; {answer}" for event, answer in zip(events, answers, strict=True)]
        events = kept


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
