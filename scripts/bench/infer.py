"""Inference speed of whole `titan infer` runs, compared with transformers and a bare loop of matrix products.

python scripts/bench/infer.py            with a GPU: 8B in bf16, int8 and float8, with and without --compile, and fp8
                                         folders of 8B's width and with 64 experts, dequantized and as stored; GPT-OSS
                                         20B's shapes, an mxfp4 folder, likewise
python scripts/bench/infer.py --on cpu   on two threads: 1.2B in fp32 and bf16, the time from start to first token, and
                                         1.3B with 64 experts, of which a token reads 8, also from a fp8 folder;
                                         GPT-OSS 20B's shapes as stored
With `--tiny`, either's rows as tiny models on a CPU, not compiled: whether they run.

Each round runs each row once, a peer just before titan; the medians of `--rounds`, and of the quotients of two rows in
each round, count. Weights are random: speed does not depend on them. A checkpoint is made when the first row that reads
it runs; `--dir` keeps them for the next time. A row that fails is a result with its error. The exit code is 1 if a row
fails or misses a limit; there are none with `--layers` or `--tiny`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpt_oss import GPT_OSS_20B, write_gpt_oss  # noqa: E402
from models import LLAMA_1B, LLAMA_8B, QWEN3_MOE, QWEN3_WIDE, write_model  # noqa: E402
from rounds import ROOT, TITAN, machine, read_once  # noqa: E402
from step_trace import print_summary  # noqa: E402

HF, DCP, EXPERTS, FP8, FP8_EXPERTS = "hf", "dcp", "experts", "fp8", "fp8-experts"
MXFP4 = "mxfp4"
SHORT, LONG, MANY = "short.txt", "long.txt", "many.jsonl"
_LETTERS = {SHORT: 200, LONG: 1600}  # about 128 and 1024 tokens
_MANY_LETTERS = [20 + 37 * n % 300 for n in range(24)]  # of the prompts of a batch, about 13 to 200 tokens
_BATCH_SIZE = 8
_PEERS, _TRACE = Path(__file__).parent / "infer_peers.py", Path(__file__).parent / "decode_trace.py"
_START_SECS = 6.0
_OF_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "num_local_experts": 8, "moe_intermediate_size": 128}
_OF_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
TINY = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 1024, "num_hidden_layers": 2}
TINY |= _OF_HEADS | _OF_EXPERTS


class RunFailed(Exception):
    """A process ended with an error: the command and its output."""


@dataclass(slots=True)
class Row:
    """A process to run, and the readings of each run, its wall time included."""

    name: str
    argv: Sequence[str]
    threads: int | None = None
    readings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def form(self) -> str:
        """The checkpoint that it reads."""
        return next(form for form in (HF, DCP, EXPERTS, FP8, FP8_EXPERTS, MXFP4) if form in self.argv)

    def middle(self, what: str) -> float | None:
        values = [reading[what] for reading in self.readings if reading.get(what) is not None]
        return median(values) if values else None


@dataclass(frozen=True, slots=True)
class Limit:
    """`what` of `row`, divided by that of `over` if there is one, is at least (or at most) `bound`, if there is one."""

    row: str
    what: str
    bound: float | None
    over: str = ""
    is_most: bool = False

    def value(self, rows: Mapping[str, Row]) -> float | None:
        """None if a row has no such reading, such as the bandwidth share on an unknown GPU."""
        if not self.over:
            return rows[self.row].middle(self.what)
        pairs = zip(rows[self.row].readings, rows[self.over].readings, strict=True)
        numbers = [(ours.get(self.what), theirs.get(self.what)) for ours, theirs in pairs]
        quotients = [ours / theirs for ours, theirs in numbers if ours and theirs]
        return median(quotients) if quotients else None

    def holds(self, value: float | None) -> bool:
        if value is None or self.bound is None:
            return self.bound is None
        return value <= self.bound if self.is_most else value >= self.bound

    def __str__(self) -> str:
        return f"{self.row}: {self.what}" + (f" over {self.over}" if self.over else "")


def cpu_rows(tokens: int) -> tuple[list[Row], list[Limit]]:
    """Two threads. One prompt: rates after the first token, in a fresh process; a batch: all its tokens."""
    rows, limits = [], []
    multiplies_bf16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    for dtype in ("float32", "bfloat16"):
        faster, faster_batch = (1.5, 1.3) if dtype == "bfloat16" and multiplies_bf16 else (1.0, 1.0)
        titan, peer, bare = (f"{who}, {dtype}" for who in ("titan", "transformers", "bare loop"))
        rows += [
            Row(peer, _peer("transformers", HF, dtype, SHORT, tokens), 2),
            Row(titan, _titan(HF, SHORT, tokens, "--dtype", dtype), 2),
            Row(f"{titan}, tp 2", _titan(HF, SHORT, tokens, "--dtype", dtype, "--tp", "2"), 1),
            Row(bare, _peer("bare", HF, dtype, SHORT, tokens), 2),
            Row(f"{peer}, long prompt", _peer("transformers", HF, dtype, LONG, 2), 2),
            Row(f"{titan}, long prompt", _titan(HF, LONG, 2, "--dtype", dtype), 2),
            Row(f"{peer}, batch", _peer("transformers", HF, dtype, MANY, tokens), 2),
            Row(f"{titan}, batch", _titan(HF, MANY, tokens, "--dtype", dtype), 2),
        ]
        limits += [
            Limit(titan, "decode_per_sec", faster, over=peer),
            Limit(titan, "decode_per_sec", 0.85, over=bare),
            Limit(f"{titan}, tp 2", "decode_per_sec", None, over=titan),
            Limit(titan, "ttft_ms", 1.0, over=peer, is_most=True),
            Limit(f"{titan}, long prompt", "ttft_ms", 1.0, over=f"{peer}, long prompt", is_most=True),
            Limit(f"{titan}, batch", "tokens_per_sec", faster_batch, over=f"{peer}, batch"),
        ]
    titan, peer, bare = (f"{who}, 64 experts" for who in ("titan", "transformers", "bare loop"))
    rows += [
        Row(peer, _peer("transformers", EXPERTS, "float32", SHORT, tokens), 2),
        Row(titan, _titan(EXPERTS, SHORT, tokens, "--dtype", "float32"), 2),
        Row(bare, _peer("bare", EXPERTS, "float32", SHORT, tokens), 2),
    ]
    limits += [
        Limit(titan, "decode_per_sec", 1.0, over=peer),
        Limit(titan, "decode_per_sec", 0.85, over=bare),
    ]
    rows += _fp8_rows(FP8_EXPERTS, "64 experts", tokens, threads=2)
    stored = "GPT-OSS 20B, as stored"
    rows.append(Row(stored, _titan(MXFP4, SHORT, tokens, "--quantize", "stored"), 2))
    limits.append(Limit(stored, "peak_memory_gib", 16.0, is_most=True))
    for form in (HF, DCP):
        rows.append(Row(f"start to first token, {form}", _titan(form, SHORT, 1), 2))
        limits.append(Limit(f"start to first token, {form}", "wall_secs", _START_SECS, is_most=True))
    return rows, limits


def gpu_rows(tokens: int) -> tuple[list[Row], list[Limit]]:
    """Limits are shares of the memory's bandwidth on one H200; gpt-fast reaches 0.57 to 0.70 on H100 and A100.

    They are for compiled steps, as gpt-fast's are: uncompiled, a layer takes about twenty kernels instead of ten.
    """
    rows, limits = [], []
    quantized = (
        ("bfloat16", (), 0.65),
        ("int8", ("--quantize", "int8"), 0.50),
        ("float8", ("--quantize", "float8"), 0.48),
    )
    for name, options, least in quantized:  # the compiled rows, which have limits, first
        rows.append(Row(f"8B, {name}, --compile", _titan(HF, SHORT, tokens, "--compile", *options)))
        limits.append(Limit(f"8B, {name}, --compile", "bandwidth_share", least))
    rows += [Row(f"8B, {name}", _titan(HF, SHORT, tokens, *options)) for name, options, _ in quantized]
    for form, of in ((FP8, "8B's width"), (FP8_EXPERTS, "64 experts")):
        rows += _fp8_rows(form, of, tokens, "--compile") + _fp8_rows(form, of, tokens)
    dequantized, stored = (f"GPT-OSS 20B, {how}" for how in ("dequantized", "as stored"))
    rows.append(Row(dequantized, _titan(MXFP4, SHORT, tokens, "--dtype", "bfloat16")))
    rows.append(Row(stored, _titan(MXFP4, SHORT, tokens, "--quantize", "stored")))
    # A token reads 53 MB of attention in each of 24 layers, 199 MB of 4 experts in bf16 or 53 MB of their codes, and an
    # output layer of 1,158 MB: (24 · 252 + 1158) / (24 · 106 + 1158) = 1.95 times the bytes. 1.7 is 87 % of it
    limits.append(Limit(stored, "decode_per_sec", 1.7, over=dequantized))
    return rows, limits


def _fp8_rows(form: str, of: str, tokens: int, *options: str, threads: int | None = None) -> list[Row]:
    """A fp8 folder, dequantized while it is read and as it is stored, both computed in bfloat16."""
    hows = (("dequantized", ("--dtype", "bfloat16")), ("as stored", ("--quantize", "stored")))
    return [
        Row(", ".join((of, "fp8 folder", how, *options)), _titan(form, SHORT, tokens, *more, *options), threads)
        for how, more in hows
    ]


def _titan(form: str, prompt: str, tokens: int, *options: str) -> list[str]:
    many = prompt == MANY
    return [
        *TITAN,
        *("infer", form, "--batch" if many else "--prompt-file", prompt),
        *(("--batch-size", str(_BATCH_SIZE)) if many else ()),
        *("--max-new-tokens", str(tokens), "--ignore-eos", "--json"),
        *options,
    ]


def _peer(what: str, form: str, dtype: str, prompt: str, tokens: int) -> list[str]:
    return [sys.executable, str(_PEERS), what, form, dtype, prompt, str(tokens), str(_BATCH_SIZE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same rows, as tiny models on a CPU")
    parser.add_argument("--make-only", action="store_true", help="make the rows' checkpoints in --dir, and run nothing")
    parser.add_argument("--layers", type=int, help="cut every model to so many layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="new ones of each run; default: 40 on a CPU, 512 on a GPU")
    parser.add_argument("--only", default=[""], nargs="+", help="rows whose name contains one of these")
    parser.add_argument("--exact", action="store_true", help="only the rows that --only names in full")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a decode step after each run")
    parser.add_argument("--out", type=Path, help="append every reading to this file, as a line of JSON")
    parser.add_argument("--dir", type=Path, help="where the checkpoints are, or are put and kept")
    chosen = parser.parse_args()
    on_cpu = chosen.on == "cpu"
    tokens = chosen.tokens or (40 if on_cpu else 512)
    rows, limits = (cpu_rows if on_cpu else gpu_rows)(tokens)
    rows = [row for row in rows if any(part == row.name if chosen.exact else part in row.name for part in chosen.only)]
    if chosen.tiny:  # a CPU compiles for minutes
        rows = [replace(row, argv=[word for word in row.argv if word != "--compile"]) for row in rows]
    if not rows:
        parser.error(f"no row's name contains {' or '.join(chosen.only)}")
    sizes = TINY if chosen.tiny else {"num_hidden_layers": chosen.layers} if chosen.layers else {}
    with TemporaryDirectory(prefix="titan-bench-") as temporary:
        work = (chosen.dir or Path(temporary)).absolute()
        work /= "tiny" if chosen.tiny else f"{chosen.layers} layers" if chosen.layers else ""
        write_prompts(work)
        llama = LLAMA_1B if on_cpu else LLAMA_8B
        if chosen.make_only:
            for row in rows:
                prepare(work, row.form, llama, sizes)
            return
        for number in range(chosen.rounds):
            for row in rows:
                print(f"round {number + 1} of {chosen.rounds}: {row.name}", file=sys.stderr, flush=True)
                try:
                    prepare(work, row.form, llama, sizes)
                    reading = _read(row, work, on_cpu=on_cpu or chosen.tiny, profiles=chosen.profile)
                except RunFailed as error:  # such as out of memory: the other rows still count
                    print(error, file=sys.stderr, flush=True)
                    reading = {"error": str(error)[-2000:]}
                row.readings.append(reading)
                if chosen.out:
                    with chosen.out.open("a") as file:
                        file.write(json.dumps({"row": row.name, "round": number + 1, **reading}) + "\n")
        if sizes:  # the quotients are still printed
            limits = [replace(limit, bound=None) for limit in limits]
        ok = _print_table(rows, limits, machine(work))
    raise SystemExit(0 if ok else 1)


def write_prompts(work: Path) -> None:
    """The prompts of all rows."""
    work.mkdir(parents=True, exist_ok=True)
    text = (ROOT / "README.md").read_text()
    for name, letters in _LETTERS.items():
        (work / name).write_text(text[:letters])
    prompts = [{"id": n, "prompt": text[50 * n :][:letters]} for n, letters in enumerate(_MANY_LETTERS)]
    (work / MANY).write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def prepare(work: Path, form: str, llama: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Make a row's checkpoint, if it is missing, and read its files into the page cache.

    `sizes`: in place of the model's own numbers.
    """
    if (work / form).is_dir():
        return

    def sized(config: Mapping[str, Any]) -> dict[str, Any]:
        made = {**config, **{name: size for name, size in sizes.items() if name in config}}
        if "layer_types" in made:
            made["layer_types"] = made["layer_types"][: made["num_hidden_layers"]]
        return made

    made = work / "unfinished"
    for name in ("unfinished", "unfinished-dcp", "unfinished-fp8"):
        shutil.rmtree(work / name, ignore_errors=True)
    config = sized(
        {HF: llama, DCP: llama, EXPERTS: QWEN3_MOE, FP8: QWEN3_WIDE, FP8_EXPERTS: QWEN3_MOE}.get(form, GPT_OSS_20B)
    )
    if form == MXFP4:
        write_gpt_oss(made, config)
    else:
        write_model(made, config, normal=True)
    write_tokenizer(made, config["vocab_size"])
    if form in (DCP, FP8, FP8_EXPERTS):
        _run(["convert", "hf-to-dcp", "unfinished", "unfinished-dcp"], work)
        shutil.rmtree(made)
        made = work / "unfinished-dcp"
    if form in (FP8, FP8_EXPERTS):
        _run(["convert", "dcp-to-hf", "unfinished-dcp", "unfinished-fp8", "--quantize", "fp8"], work)
        shutil.rmtree(made)
        made = work / "unfinished-fp8"
    made.rename(work / form)
    read_once(work / form)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer.json as large as Llama 3's: tokens are all pairs of bytes, and pairs followed by one byte.

    Eight rows stay free for the special tokens that a family's tokenizer class has by itself.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters for b in letters]
    merges += [(a + b, letters[0]) for a, b in merges]
    tokens = [*letters, *dict.fromkeys(a + b for a, b in merges)]
    num = min(len(tokens), vocab_size - 256)
    known = set(tokens[:num])
    merges = [(a, b) for a, b in merges if a + b in known]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens[:num])}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|{n}|>" for n in range(vocab_size - num - 8)])
    tokenizer.save(str(folder / "tokenizer.json"))


def _read(row: Row, work: Path, *, on_cpu: bool, profiles: bool) -> dict[str, Any]:
    """The readings of one run, its wall time, and with `profiles` what a decode step consists of."""
    environment = dict(os.environ)
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if row.threads is not None:
        environment["OMP_NUM_THREADS"] = str(row.threads)
    started = time.perf_counter()
    argv = list(row.argv)
    if profiles and argv[: len(TITAN)] == list(TITAN):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
        argv[: len(TITAN)] = [sys.executable, "-P", str(_TRACE), "step.json"]
    output = json.loads(_output(argv, work, environment))
    reading = {"wall_secs": time.perf_counter() - started} | output.get("stats", output)
    if reading.get("tpot_ms"):
        reading["decode_per_sec"] = 1000 / reading["tpot_ms"]
    reading = {name: value for name, value in reading.items() if isinstance(value, int | float)}
    if argv != list(row.argv):
        reading["step"] = json.loads((work / "step.json").read_text())
        if "step_ms" in reading["step"]:
            print_summary(reading["step"])
    return reading


def _run(arguments: Sequence[str], work: Path) -> None:
    _output([*TITAN, *arguments], work, dict(os.environ))


def _output(argv: Sequence[str], work: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(argv, cwd=work, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RunFailed(f"{' '.join(argv)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _print_table(rows: Sequence[Row], limits: Sequence[Limit], place: dict[str, Any]) -> bool:
    columns = (
        ("decode_per_sec", "steps/s", "{:.2f}"),  # tokens after the first; in a batch, of each sequence
        ("tokens_per_sec", "all tokens/s", "{:.2f}"),
        ("ttft_ms", "first token ms", "{:.0f}"),
        ("bandwidth_gb_per_sec", "GB/s", "{:.1f}"),
        ("bandwidth_share", "share", "{:.1%}"),
        ("peak_memory_gib", "GiB", "{:.2f}"),
        ("wall_secs", "whole run s", "{:.1f}"),
    )
    table = [["", *(title for _, title, _ in columns)]]
    for row in rows:
        middles = [(row.middle(name), form) for name, _, form in columns]
        name = row.name + (": FAILED" if any("error" in reading for reading in row.readings) else "")
        table.append([name, *("" if value is None else form.format(value) for value, form in middles)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = zip(line, widths, strict=True)
        print("  ".join(c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(cells)))
    by_name = {row.name: row for row in rows}
    judged = []
    for limit in limits:
        if not {limit.row, limit.over or limit.row} <= by_name.keys():
            continue
        value = limit.value(by_name)
        ok = limit.holds(value)
        judged.append({"limit": str(limit), "value": value, "bound": limit.bound, "ok": ok})
        shown = "unknown" if value is None else f"{value:.2f}"
        bound = "no limit" if limit.bound is None else f"{'at most' if limit.is_most else 'at least'} {limit.bound:g}"
        print(f"{limit}: {shown} ({bound}){'' if ok else '  MISSED'}")
    ok = all(j["ok"] for j in judged) and not any("error" in reading for row in rows for reading in row.readings)
    results = [{"name": row.name, "readings": row.readings} for row in rows]
    versions = {name: version(name) for name in ("torch", "torchao", "transformers")}
    print(json.dumps({"ok": ok, "machine": place, "versions": versions, "limits": judged, "results": results}))
    return ok


if __name__ == "__main__":
    main()
