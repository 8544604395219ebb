"""Training speed by layout and option: tokens/s, MFU and memory of whole `titan train` runs, as they report them.

python scripts/bench/train.py            with a GPU: 8B width with 12 layers, and 1B; eager, compile, compile+float8
python scripts/bench/train.py --on cpu   the debug model on 1 and 4 gloo ranks, beside torchtitan's figures

The rows take turns, `--rounds` times. Of each run the log lines after the first few count, and of these the median.
Weights and data are random: speed does not depend on them. Where a row has a limit and misses it, the exit code is 1.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rounds import ROOT, TITAN, machine  # noqa: E402

WARMUP_LINES = 2
FLAVORS = """
from dataclasses import replace

from converters.families.llama3 import LLAMA3
from converters.families.registry import register

twelve_layers = replace(LLAMA3.flavors["8B"], num_layers=12)
register(replace(LLAMA3, flavors={**LLAMA3.flavors, "8B, 12 layers": twelve_layers}))
"""
CONFIG = """
[training]
dataset = "tokens"
dataset_path = "data"
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 2
[experimental]
custom_import = "bench_flavors.py"
"""
_8B = ("--model.flavor", "8B, 12 layers", "--training.seq_len", "8192", "--training.local_batch_size", "2")
_1B = ("--model.flavor", "1B", "--training.seq_len", "8192", "--training.local_batch_size", "4")
_KEEP_ALL = ("--activation_checkpoint.mode", "none")
_COMPILE = ("--compile.enable",)
_FLOAT8 = (*_COMPILE, "--model.converters", "quantize.linear.float8")
_DEBUG = ("--model.flavor", "debugmodel", "--training.seq_len", "256", "--training.local_batch_size", "8")
_TP, _PP = "--parallelism.tensor_parallel_degree", "--parallelism.pipeline_parallel_degree"


@dataclass(slots=True)
class Row:
    """A run: `least` names a reading and what it must reach, `times` another row and its speed over it."""

    name: str
    options: tuple[str, ...]
    nproc: int = 1
    least: tuple[str, float] | None = None
    times: tuple[str, float] | None = None
    readings: list[dict[str, float]] = field(default_factory=list)

    def middle(self, name: str) -> float | None:
        values = [reading[name] for reading in self.readings if name in reading]
        return median(values) if values else None


def gpu_rows() -> list[Row]:
    """Goals on one H200: 55 % MFU in bf16 with compile, float8 1.5 × as fast as eager bf16."""
    return [
        Row("8B width, 12 layers: eager", (*_8B, *_KEEP_ALL)),
        Row("8B width, 12 layers: compile", (*_8B, *_KEEP_ALL, *_COMPILE), least=("mfu", 0.55)),
        Row(
            "8B width, 12 layers: compile, float8",
            (*_8B, *_KEEP_ALL, *_FLOAT8),
            times=("8B width, 12 layers: eager", 1.5),
        ),
        Row("1B: eager", (*_1B, *_KEEP_ALL)),
        Row("1B: compile", (*_1B, *_KEEP_ALL, *_COMPILE)),
        Row("1B: compile, float8", (*_1B, *_KEEP_ALL, *_FLOAT8)),
    ]


def cpu_rows() -> list[Row]:
    """Limits: torchtitan 0.2.2, patched to run on two such cores, all ranks together."""
    tokens = "tokens_per_sec"
    return [
        Row("1 rank, 2 threads", _DEBUG, least=(tokens, 6562)),
        Row("FSDP 4", _DEBUG, 4, least=(tokens, 5858)),
        Row("FSDP 2 × TP 2", (*_DEBUG, _TP, "2"), 4, least=(tokens, 3734)),
        Row("FSDP 2 × PP 2", (*_DEBUG, _PP, "2"), 4, least=(tokens, 4818)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("rest", nargs="*", help="further --section.key VALUE for every row, after --")
    chosen = parser.parse_args()
    rows = [row for row in (gpu_rows if chosen.on == "cuda" else cpu_rows)() if chosen.only in row.name]
    with TemporaryDirectory(prefix="titan-bench-") as folder:
        work = Path(folder)
        (work / "bench_flavors.py").write_text(FLAVORS)
        (work / "bench.toml").write_text(CONFIG)
        text = [str(ROOT / name) for name in ("converters", "trainer", "README.md")]
        _run(work, ["data", "prepare", *text, "--out", "data"], on="cpu")
        for number in range(chosen.rounds):
            for row in rows:
                print(f"round {number + 1} of {chosen.rounds}: {row.name}", file=sys.stderr, flush=True)
                row.readings.append(_read(work, row, steps=chosen.steps, on=chosen.on, rest=chosen.rest))
        ok = _print_table(rows, machine(work))
    raise SystemExit(0 if ok else 1)


def _read(work: Path, row: Row, *, steps: int, on: str, rest: list[str]) -> dict[str, float]:
    """The medians of one run's own log."""
    dump = work / "run"
    (dump / "metrics.jsonl").unlink(missing_ok=True)
    keys = ["--job.dump_folder", str(dump), "--training.steps", str(steps)]
    _run(work, ["train", "bench.toml", *row.options, *keys, *rest, "--nproc", str(row.nproc)], on=on)
    records = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()][WARMUP_LINES:]
    names = ("tokens_per_sec", "mfu", "tflops_per_rank", "memory_gib")
    return {name: median(r[name] for r in records) for name in names if name in records[0]}


def _run(work: Path, arguments: list[str], *, on: str) -> None:
    environment = dict(os.environ)
    if on == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([*TITAN, *arguments], cwd=work, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"titan {' '.join(arguments)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")


def _print_table(rows: list[Row], place: dict[str, Any]) -> bool:
    by_name = {row.name: row for row in rows}
    results = []
    for row in rows:
        result: dict[str, Any] = {"name": row.name, "ok": True, "readings": row.readings}
        result |= {name: row.middle(name) for name in ("tokens_per_sec", "mfu", "memory_gib")}
        if row.least:
            result["least"], result["ok"] = row.least, (row.middle(row.least[0]) or 0) >= row.least[1]
        if row.times and row.times[0] in by_name:
            ratio = row.middle("tokens_per_sec") / by_name[row.times[0]].middle("tokens_per_sec")
            result["ratio"], result["least"], result["ok"] = ratio, row.times, ratio >= row.times[1]
        results.append(result)
        mfu = f"MFU {result['mfu']:6.1%}  " if result["mfu"] is not None else ""
        limit = f"  (at least {result['least'][1]:g} × {result['least'][0]})" if "ratio" in result else ""
        limit = limit or (f"  (at least {row.least[1]:g} of {row.least[0]})" if row.least else "")
        ratio = f"  {result['ratio']:.2f} ×" if "ratio" in result else ""
        print(
            f"{row.name:38} {result['tokens_per_sec']:10,.0f} tokens/s  {mfu}{result['memory_gib']:6.2f} GiB"
            f"{ratio}{limit}{'' if result['ok'] else '  TOO SLOW'}"
        )
    ok = all(result["ok"] for result in results)
    versions = {name: version(name) for name in ("torch", "torchao")}
    print(json.dumps({"ok": ok, "machine": place, "versions": versions, "results": results}))
    return ok


if __name__ == "__main__":
    main()
