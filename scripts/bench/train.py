"""Training speed by layout and option: tokens/s, MFU, memory and seconds of the first step of `titan train` runs.

python scripts/bench/train.py                   with a GPU: 8B width and 1B; eager, compile, compile + float8; 30B-A3B's
                                                width; documents by flex and varlen
python scripts/bench/train.py --tiny            the same rows, tiny, on a CPU, layers not compiled: whether they run
python scripts/bench/train.py --on cpu --peer   the debug model on 1 and 4 gloo ranks, in alternation with torchtitan

Each round runs each row once. A run's reading is the median of its log lines after the first few; a row's result is the
median of its readings. `--out` appends every reading to a file as soon as it is taken. Weights and data are random:
speed does not depend on them. The exit code is 1 where a row misses its limit.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rounds import ROOT, TITAN, machine  # noqa: E402
from step_trace import print_summary, summarize  # noqa: E402

WARMUP_LINES = 2
TORCHTITAN = "0.2.2"
FLAVORS = """
from dataclasses import replace

from converters.families.llama3 import LLAMA3
from converters.families.qwen3 import QWEN3
from converters.families.registry import register

DENSE, SMALL, EXPERTS = "8B", "1B", "30B-A3B"
whole, experts = LLAMA3.flavors[DENSE], QWEN3.flavors[EXPERTS]
cut = {f"8B, {num} layers": replace(whole, num_layers=num) for num in (2, 8, 12)} | {"1B": LLAMA3.flavors[SMALL]}
register(replace(LLAMA3, flavors={**LLAMA3.flavors, **cut}))
register(replace(QWEN3, flavors={**QWEN3.flavors, "30B-A3B, 4 layers": replace(experts, num_layers=4)}))
"""
# FLAVORS and options that make every row a run of seconds on a CPU
TINY_FLAVORS = FLAVORS.replace('"8B", "1B", "30B-A3B"\n', '"debug_gqa", "debug_gqa", "debug_moe"\n')
TINY = (
    "--training.seq_len",
    "128",
    "--compile.backend",
    "aot_eager",
    "--quantize.linear.float8.emulate",
    "--compile.components",
    "loss",
)
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
PEER_CONFIG = """
[model]
name = "llama3"
hf_assets_path = "data"
[training]
dataset = "c4_test"
dataset_path = "documents"
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
_KEEP_ALL = ("--activation_checkpoint.mode", "none")
_COMPILE = ("--compile.enable",)
_FLOAT8 = (*_COMPILE, "--model.converters", "quantize.linear.float8")
_BATCH = "--training.local_batch_size"
_DEBUG = ("--model.flavor", "debugmodel", "--training.seq_len", "256", "--training.local_batch_size", "8")
_TP, _PP = "--parallelism.tensor_parallel_degree", "--parallelism.pipeline_parallel_degree"


class RunFailed(Exception):
    """A run ended with an error: the command and its output."""


@dataclass(slots=True)
class Row:
    """A run. `least`: a reading and its lower limit. `times`: another row, and the lower limit of the speed ratio."""

    name: str
    options: tuple[str, ...]
    nproc: int = 1
    needs_gb: float = 0.0  # of GPU memory
    is_peer: bool = False
    least: tuple[str, float] | None = None
    times: tuple[str, float] | None = None
    readings: list[dict[str, Any]] = field(default_factory=list)

    def middle(self, name: str) -> float | None:
        values = [reading[name] for reading in self.readings if reading.get(name) is not None]
        return median(values) if values else None


def gpu_rows() -> list[Row]:
    """Most valuable first. Goals on one H200: 55 % MFU in bf16 with compile, float8 1.3 × as fast as eager bf16.

    `needs_gb` is the upper bound that titan estimate-memory --gpu h100-80 gives for nvidia-smi, of the eager row.
    """
    rows = []
    for layers, needs_gb in ((12, 96.0), (8, 72.0)):
        size = f"8B width, {layers} layers"
        options = ("--model.flavor", f"8B, {layers} layers", "--training.seq_len", "8192", _BATCH, "2", *_KEEP_ALL)
        variants: list[tuple[str, tuple[str, ...], Any, Any]] = [
            ("compile", _COMPILE, ("mfu", 0.55), None),
            ("eager", (), None, None),
            ("compile, float8", _FLOAT8, None, (f"{size}: eager", 1.3)),
            ("compile, loss in 8 chunks", (*_COMPILE, "--training.loss_chunks", "8"), None, None),
            ("compile, plain loss", (*_COMPILE, "--training.loss", "plain"), None, None),
        ]
        rows += [
            Row(f"{size}: {name}", (*options, *more), needs_gb=needs_gb, least=least, times=times)
            for name, more, least, times in variants
        ]
    experts = ("--model.name", "qwen3", "--model.flavor", "30B-A3B, 4 layers", "--debug.moe_force_load_balance")
    experts += ("--training.seq_len", "4096", _BATCH, "2", *_KEEP_ALL)
    for name, more in (("compile", _COMPILE), ("eager", ())):
        rows.append(Row(f"30B-A3B width, 4 layers: {name}", (*experts, *more), needs_gb=60.0))
    within = ("--training.document_mask", "offsets", "--model.attn_type")
    documents = ("--model.flavor", "8B, 2 layers", "--training.seq_len", "8192", _BATCH, "2", *_KEEP_ALL, *_COMPILE)
    for name, more in (
        ("causal", ()),
        ("documents, flex", (*within, "flex")),
        ("documents, varlen", (*within, "varlen")),
    ):
        rows.append(Row(f"8B width, 2 layers: {name}", (*documents, *more), needs_gb=34.0))
    small = ("--model.flavor", "1B", "--training.seq_len", "8192", _BATCH, "4", *_KEEP_ALL)
    for name, more in (("compile", _COMPILE), ("eager", ()), ("compile, float8", _FLOAT8)):
        rows.append(Row(f"1B: {name}", (*small, *more), needs_gb=75.0))
    return rows


def cpu_rows(*, peer: bool) -> list[Row]:
    """Four layouts; with `peer`, each after torchtitan's run of the same options, with their ratio as its limit."""
    rows = [
        Row("1 rank, 2 threads", _DEBUG),
        Row("FSDP 4", _DEBUG, 4),
        Row("FSDP 2 × TP 2", (*_DEBUG, _TP, "2"), 4),
        Row("FSDP 2 × PP 2", (*_DEBUG, _PP, "2"), 4),
    ]
    if not peer:
        return rows
    pairs = [(replace(row, name=f"torchtitan: {row.name}", is_peer=True, readings=[]), row) for row in rows]
    for other, row in pairs:
        row.times = (other.name, 1.0 if _TP in row.options else 1.1)
    return [row for pair in pairs for row in pair]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the rows of a GPU, as tiny models on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--exact", action="store_true", help="only the row that --only names in full")
    parser.add_argument("--gb", type=float, default=0, help="GPU memory; rows that need more are left out")
    parser.add_argument("--profile", action="store_true", help="summarize a trace of each run's last step")
    parser.add_argument("--out", type=Path, help="append every reading to this file, as a line of JSON")
    parser.add_argument("--peer", action="store_true", help=f"also torchtitan {TORCHTITAN} (on the CPU)")
    parser.add_argument("--peer-env", type=Path, help="its virtual environment, kept; created if it does not exist")
    parser.add_argument("rest", nargs="*", help="further --section.key VALUE for every row, after --")
    chosen = parser.parse_args()
    rows = gpu_rows() if chosen.on == "cuda" or chosen.tiny else cpu_rows(peer=chosen.peer)
    if chosen.tiny:
        chosen.on, rows = "cpu", [replace(row, least=None, times=None) for row in rows]
    rows = [row for row in rows if (chosen.only == row.name if chosen.exact else chosen.only in row.name)]
    rows = [row for row in rows if not chosen.gb or row.needs_gb <= chosen.gb]
    if not rows:
        parser.error(f"no row is left: --only {chosen.only!r}, --gb {chosen.gb:g}")
    with TemporaryDirectory(prefix="titan-bench-") as folder:
        work = Path(folder)
        prepare(work, FLAVORS if not chosen.tiny else TINY_FLAVORS)
        peer = _torchtitan_python(chosen.peer_env or work / "torchtitan") if chosen.peer else None
        for number in range(chosen.rounds):
            for row in rows:
                print(f"round {number + 1} of {chosen.rounds}: {row.name}", file=sys.stderr, flush=True)
                try:
                    reading = _read(work, row, chosen, peer)
                except RunFailed as error:  # such as out of memory: the other rows still count
                    print(error, file=sys.stderr, flush=True)
                    reading = {"error": str(error)[-2000:]}
                row.readings.append(reading)
                _write(chosen.out, {"row": row.name, "round": number + 1, **reading})
        ok = _print_table(rows, machine(work), chosen.out)
    raise SystemExit(0 if ok else 1)


def prepare(work: Path, flavors: str) -> None:
    """Configs, tokens for titan and the same text for torchtitan."""
    (work / "bench_flavors.py").write_text(flavors)
    (work / "bench.toml").write_text(CONFIG)
    (work / "torchtitan.toml").write_text(PEER_CONFIG)
    sources = [ROOT / name for name in ("converters", "trainer", "README.md")]
    _run([*TITAN, "data", "prepare", *map(str, sources), "--out", "data"], work, {"CUDA_VISIBLE_DEVICES": ""})
    (work / "documents").mkdir()
    with (work / "documents" / "train.jsonl").open("w") as file:
        for path in sorted(ROOT.glob("trainer/**/*.py")):
            file.write(json.dumps({"text": path.read_text()}) + "\n")


def _torchtitan_python(folder: Path) -> Path:
    """The Python of an environment with torchtitan and this environment's version of torch."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing torchtitan {TORCHTITAN} into {folder}", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", str(folder)], Path.cwd(), {})
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*install, f"torch=={version('torch').split('+')[0]}"], Path.cwd(), {})  # first, so that pip keeps it
        # torchtitan imports triton for kernels that no dense model uses
        _run([*install, f"torchtitan=={TORCHTITAN}", f"torchao=={version('torchao')}", "triton"], Path.cwd(), {})
    return python


def _read(work: Path, row: Row, chosen: argparse.Namespace, peer: Path | None) -> dict[str, Any]:
    """The reading of one run: of titan's log, or of torchtitan's."""
    dump = work / "run"
    (dump / "metrics.jsonl").unlink(missing_ok=True)
    options = [*row.options, "--job.dump_folder", str(dump), "--training.steps", str(chosen.steps)]
    options += [*(TINY if chosen.tiny else ()), *chosen.rest]
    environment = {"CUDA_VISIBLE_DEVICES": ""} if chosen.on == "cpu" else {}
    started = time.perf_counter()
    if row.is_peer:
        torchrun = [str(peer), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.nproc}"]
        threads = str(max(1, len(os.sched_getaffinity(0)) // row.nproc))
        environment |= {"OMP_NUM_THREADS": threads, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"HF_HOME": str(work / "cache")}
        script = str(Path(__file__).parent / "torchtitan_on_cpu.py")
        log = _run([*torchrun, script, "--job.config_file", "torchtitan.toml", *options], work, environment)
        rates = [float(rate.replace(",", "")) for rate in re.findall(r"tps: ([\d,]+)", log)]
        return {"tokens_per_sec": row.nproc * median(rates[WARMUP_LINES:]), "wall_secs": time.perf_counter() - started}
    if chosen.profile:
        options += ["--profiling.enable_profiling", "--profiling.profile_freq", str(chosen.steps)]
    _run([*TITAN, "train", "bench.toml", *options, "--nproc", str(row.nproc)], work, environment)
    records = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]
    counted = records[WARMUP_LINES : -1 if chosen.profile else None]  # the profiled step is slower
    names = ("tokens_per_sec", "mfu", "tflops_per_rank", "memory_gib")
    reading = {name: median(record[name] for record in counted) for name in names if name in records[0]}
    reading["first_step_secs"] = records[0]["ntokens_seen"] / records[0]["tokens_per_sec"]
    reading["wall_secs"] = time.perf_counter() - started
    if chosen.profile:
        trace = next((dump / "profile_traces").glob(f"iteration_{chosen.steps}/rank0_trace.json"))
        summary = summarize(json.loads(trace.read_text()))
        print_summary(summary)
        reading["step"] = summary
    return reading


def _run(argv: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a process to its end and return its output. Raises RunFailed if it fails."""
    done = subprocess.run(
        argv, cwd=folder, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RunFailed(f"{' '.join(argv)}\nended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def _write(out: Path | None, line: dict[str, Any]) -> None:
    if out:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _print_table(rows: list[Row], place: dict[str, Any], out: Path | None) -> bool:
    by_name = {row.name: row for row in rows}
    results = []
    for row in rows:
        result: dict[str, Any] = {"name": row.name, "ok": True, "readings": row.readings}
        names = ("tokens_per_sec", "mfu", "memory_gib", "first_step_secs")
        result |= {name: row.middle(name) for name in names}
        limit = ""
        if result["tokens_per_sec"] is None:
            results.append(result | {"ok": False})
            print(f"{row.name:40} FAILED")
            continue
        if row.least:
            result["least"], result["ok"] = row.least, (row.middle(row.least[0]) or 0) >= row.least[1]
            limit = f"  (at least {row.least[1]:g} of {row.least[0]})"
        if row.times and row.times[0] in by_name:
            other = by_name[row.times[0]]
            result["least"], rate = row.times, other.middle("tokens_per_sec")
            result["ratio"] = ratio = row.middle("tokens_per_sec") / rate if rate else None
            result["ok"] = ratio is not None and ratio >= row.times[1]
            shown = f"{ratio:.2f}" if ratio else "?"
            limit = f"  {shown} × {other.name} (at least {row.times[1]:g})"
        results.append(result)
        cells = [f"{row.name:40} {result['tokens_per_sec']:10,.0f} tokens/s"]
        cells += [f"MFU {result['mfu']:6.1%}"] if result["mfu"] is not None else []
        cells += [f"{result['memory_gib']:6.2f} GiB"] if result["memory_gib"] is not None else []
        cells += [f"first step {result['first_step_secs']:5.1f} s"] if result["first_step_secs"] is not None else []
        print("  ".join(cells) + limit + ("" if result["ok"] else "  TOO SLOW"))
    ok = all(result["ok"] for result in results)
    versions = {name: version(name) for name in ("torch", "torchao")}
    summary = {"ok": ok, "machine": place, "versions": versions, "results": results}
    print(json.dumps(summary))
    _write(out, summary)
    return ok


if __name__ == "__main__":
    main()
