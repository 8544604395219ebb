"""Measure the time and host memory of `titan estimate-memory` for whole jobs.

    python scripts/bench/estimate.py --rounds 3

Limits are for 2 quiet cores: median seconds, and MB (10**6 bytes) that the process and its children hold at most,
shared pages counted once. Library pages shared with other processes count only in part, so run nothing else meanwhile.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from rounds import ROOT, TITAN, machine  # noqa: E402

MB = 10**6
MOST_MB = 700


@dataclass(slots=True)
class Case:
    name: str
    words: list[str]
    most_secs: float
    secs: list[float] = field(default_factory=list)
    most_bytes: int = 0


EAGER = ["--compile.no_enable", "--parallelism.no_enable_async_tensor_parallel"]
EXPERTS = ["qwen3_32b", "--model.flavor=235B-A22B", "--world-size=512", "--activation_checkpoint.mode=full"]
EXPERTS += ["--parallelism.data_parallel_shard_degree=-1", "--parallelism.tensor_parallel_degree=1"]
PIPELINE = ["--parallelism.pipeline_parallel_degree=8", "--parallelism.pipeline_parallel_schedule=1F1B"]
PIPELINE += ["--parallelism.tensor_parallel_degree=4", "--parallelism.expert_parallel_degree=32"]
PIPELINE += ["--training.local_batch_size=16"]
DEEPSEEK = ["tests/unit/trainer/config/configs/deepseek_v3_671b.toml", "--world-size=512"]
DEEPSEEK += ["--parallelism.pipeline_parallel_degree=8", "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]
DEEPSEEK += ["--parallelism.expert_parallel_degree=32", "--training.local_batch_size=16"]
DEEPSEEK += ["--activation_checkpoint.mode=full", "--debug.moe_force_load_balance"]
CASES = [
    Case("8B on 8 ranks", ["llama3_8b", "--world-size=8", *EAGER], 4),
    Case("70B on 256: FSDP 32 × TP 8", ["llama3_70b_256", *EAGER], 8),
    Case("405B on 512: FSDP 8 × TP 8 × PP 8", ["llama3_405b_512", *EAGER], 15),
    Case("235B-A22B on 512: FSDP, EP 8", [*EXPERTS, "--parallelism.expert_parallel_degree=8", *EAGER], 20),
    Case("235B-A22B on 512: FSDP 16 × TP 4 × PP 8, EP 32", [*EXPERTS, *PIPELINE, *EAGER], 20),
    Case("DeepSeek V3 671B on 512: FSDP 64 × PP 8, EP 32", [*DEEPSEEK, *EAGER], 30),
    Case("671B on 512, compiled", [*DEEPSEEK, "--compile.components=model,loss"], 30),
    Case("8B on 8 ranks, compiled", ["llama3_8b", "--world-size=8", "--compile.enable"], 20),
    Case("70B on 256, compiled", ["llama3_70b_256", "--parallelism.no_enable_async_tensor_parallel"], 20),
    Case("405B on 512, compiled", ["llama3_405b_512"], 20),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    for _ in range(rounds):
        for case in CASES:
            _run(case)
    for case in CASES:
        verdict = "ok" if _ok(case) else "TOO MUCH"
        print(
            f"{case.name:40} median {median(case.secs):6.2f} s  ({min(case.secs):.2f}–{max(case.secs):.2f}, limit"
            f" {case.most_secs} s)  {case.most_bytes / MB:4.0f} MB (limit {MOST_MB})  {verdict}"
        )
    results = [
        {"name": c.name, "secs": c.secs, "limit_secs": c.most_secs, "mb": round(c.most_bytes / MB), "ok": _ok(c)}
        for c in CASES
    ]
    ok = all(map(_ok, CASES))
    print(json.dumps({"ok": ok, "rounds": rounds, "machine": machine(ROOT / "README.md"), "results": results}))
    raise SystemExit(0 if ok else 1)


def _ok(case: Case) -> bool:
    return median(case.secs) <= case.most_secs and case.most_bytes <= MOST_MB * MB


def _run(case: Case) -> None:
    print(case.name, file=sys.stderr, flush=True)
    started = time.perf_counter()
    with subprocess.Popen(
        [*TITAN, "estimate-memory", *case.words, "--json"], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        held = 0
        while process.poll() is None:
            held = max(held, _held_bytes(process.pid))
            time.sleep(0.25)  # asking more often slows the process down: its pages are counted meanwhile
        case.secs.append(round(time.perf_counter() - started, 2))
    case.most_bytes = max(case.most_bytes, held)
    if process.returncode:
        raise SystemExit(f"estimate-memory {' '.join(case.words)} ended with {process.returncode}")


def _held_bytes(pid: int) -> int:
    """Memory of a process and its children, what they share counted once (Pss); 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    own = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return own + sum(_held_bytes(int(child)) for child in children)


if __name__ == "__main__":
    main()
