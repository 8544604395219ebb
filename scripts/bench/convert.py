"""Conversion compared with `cp -r` + fsync, in alternation: HF→DCP and DCP→HF of a Llama and a Qwen 3 of 1.2B.

python scripts/bench/convert.py --work /a/disk/with/15/GB --rounds 5
python scripts/bench/convert.py --work /a/disk/with/30/GB --rounds 3 --models qwen3_moe
python scripts/bench/convert.py --work /a/disk/with/25/GB --rounds 3 --models fp8
python scripts/bench/convert.py --work /a/disk/with/45/GB --rounds 1 --models deepseek --gb 8
python scripts/bench/convert.py --work /a/disk/with/15/GB --rounds 3 --models mxfp4
python scripts/bench/convert.py --work /a/disk/with/15/GB --rounds 3 --models llama4

The second is a Qwen 3 MoE of 8.9 GB: 2,688 tensors of experts are stacked, and unstacked again. The third has DeepSeek
V3's width, and is quantized to fp8 and dequantized again, by one worker; its limits are bytes of the source per second.
The fourth has DeepSeek V3's shapes, a source of --gb in bf16 and one in fp8, each converted by one worker and by two.
The fifth has GPT-OSS 20b's width, and is quantized to mxfp4 and dequantized again, by one worker. The last has Llama 4
Scout's width, whose experts are transposed, by one worker and by eight.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent))
from models import GPT_OSS, LLAMA4, MODELS, WIDE_MOE, deepseek_of, write_fp8_model, write_model  # noqa: E402
from rounds import TITAN, Command, compare, copy_and_fsync, read_once, remove, run  # noqa: E402

LIMITS: dict[str, list[tuple[tuple[str, ...], float, float | None]]] = {  # options, ratio, seconds of user CPU
    "llama": [((), 1.8, 1.2)],
    "qwen3": [(("--no-digest",), 1.5, None)],
    "qwen3_moe": [((), 1.8, None), (("--no-digest",), 1.5, None)],
}
RATES = {  # at least, bytes of the source per second
    "bf16 to fp8": 150e6,
    "fp8 to bf16": 250e6,
    "bf16 to mxfp4": 80e6,
    "mxfp4 to bf16": 600e6 * 1.05 / 3.39,  # 600 MB/s are written
    "Hugging Face to DCP": 250e6,
    "DCP to Hugging Face": 250e6,
}
MOST_ANON_MIB = 128 + 16 * 2  # at the default of two workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--models", nargs="+", choices=[*LIMITS, "fp8", "deepseek", "mxfp4", "llama4"], default=["llama", "qwen3"]
    )
    parser.add_argument("--gb", type=float, default=8.0, help="deepseek: bytes of each source, in 10^9")
    chosen = parser.parse_args()
    ok = True
    for model in chosen.models:
        with TemporaryDirectory(dir=chosen.work, prefix="titan-bench-") as work:
            if model == "fp8":
                ok &= _bench_fp8(Path(work), chosen.rounds)
            elif model == "deepseek":
                ok &= _bench_deepseek(Path(work), chosen.rounds, chosen.gb * 1e9)
            elif model == "mxfp4":
                ok &= _bench_mxfp4(Path(work), chosen.rounds)
            elif model == "llama4":
                ok &= _bench_llama4(Path(work), chosen.rounds)
            else:
                ok &= _bench(Path(work), model, chosen.rounds)
    raise SystemExit(0 if ok else 1)


def _bench(work: Path, model: str, rounds: int) -> bool:
    hf, dcp = work / "hf", work / "dcp"
    size = write_model(hf, MODELS[model])
    print(f"{model}: {size / 1e9:.2f} GB of bf16", flush=True)
    ok = True
    for kind, src in (("hf-to-dcp", hf), ("dcp-to-hf", dcp)):  # in turn, so that large models fit on the disk
        if src == dcp:
            run(Command("", (*TITAN, "convert", "hf-to-dcp", str(hf), str(dcp)), dcp))
            remove(hf)
        read_once(src)
        copy = copy_and_fsync(src, work / "copy")
        for options, most, most_user_secs in LIMITS[model]:
            out = work / "out"
            argv = (*TITAN, "convert", kind, str(src), str(out), *options)
            command = Command(
                " ".join((model, kind, *options)),
                argv,
                out,
                most,
                most_anon_mib=MOST_ANON_MIB,
                most_user_secs=most_user_secs,
            )
            ok &= compare(replace(copy, secs=[], user_secs=[]), [command], rounds=rounds)
            remove(out)
        remove(work / "copy")
    return ok


def _bench_fp8(work: Path, rounds: int) -> bool:
    """With the formula's scales, and with kept ones, which reads them from the folder that the first has written."""
    bf16, fp8 = work / "bf16", work / "fp8"
    write_model(bf16, WIDE_MOE, normal=True)
    run(Command("", (*TITAN, "convert", "auto", str(bf16), str(fp8), "--to", "hf", "--quantize", "fp8"), fp8))
    quantize = ("--to", "hf", "--quantize", "fp8")
    kinds = {
        "bf16 to fp8": [(bf16, quantize), (bf16, (*quantize, "--scales-from", str(fp8)))],
        "fp8 to bf16": [(fp8, ("--to", "dcp")), (fp8, ("--to", "hf"))],
    }
    ok = True
    for kind, cases in kinds.items():
        ok &= _compare_rates(work, kind, cases[0][0], [options for _, options in cases], rounds)
    return ok


def _bench_deepseek(work: Path, rounds: int, num_bytes: float) -> bool:
    bf16, fp8 = work / "bf16", work / "fp8"
    write_model(bf16, deepseek_of(num_bytes, element_bytes=2), normal=True)
    ok = _compare_rates(work, "bf16 to fp8", bf16, [("--to", "hf", "--quantize", "fp8")], rounds, workers=(1, 2))
    remove(bf16)
    write_fp8_model(fp8, deepseek_of(num_bytes, element_bytes=1))
    return _compare_rates(work, "fp8 to bf16", fp8, [("--to", "dcp")], rounds, workers=(1, 2)) and ok


def _bench_mxfp4(work: Path, rounds: int) -> bool:
    """GPT-OSS's width. Hugging Face's values are transposed, DCP's lie as the codes do."""
    bf16, mxfp4 = work / "bf16", work / "mxfp4"
    write_model(bf16, GPT_OSS, normal=True)
    quantize = ("--to", "hf", "--quantize", "mxfp4")
    ok = _compare_rates(work, "bf16 to mxfp4", bf16, [quantize], rounds)
    run(Command("", (*TITAN, "convert", "auto", str(bf16), str(mxfp4), *quantize), mxfp4))
    remove(bf16)
    return _compare_rates(work, "mxfp4 to bf16", mxfp4, [("--to", "dcp"), ("--to", "hf")], rounds) and ok


def _bench_llama4(work: Path, rounds: int) -> bool:
    hf, dcp = work / "hf", work / "dcp"
    write_model(hf, LLAMA4, normal=True)
    ok = _compare_rates(work, "Hugging Face to DCP", hf, [("--to", "dcp")], rounds, workers=(1, 8))
    run(Command("", (*TITAN, "convert", "auto", str(hf), str(dcp), "--to", "dcp"), dcp))
    remove(hf)
    return _compare_rates(work, "DCP to Hugging Face", dcp, [("--to", "hf")], rounds, workers=(1, 8)) and ok


def _compare_rates(
    work: Path,
    kind: str,
    src: Path,
    cases: Sequence[tuple[str, ...]],
    rounds: int,
    *,
    workers: Sequence[int] = (1,),
) -> bool:
    """Convert `src` with the options of each case. The limit of seconds is for one worker, and holds for more."""
    out = work / "out"
    num_bytes = sum(path.stat().st_size for path in src.iterdir())
    print(f"{kind}: {num_bytes / 1e9:.2f} GB, at least {RATES[kind] / 1e6:.0f} MB/s", flush=True)
    read_once(src)
    commands = [
        Command(
            f"{kind} {' '.join(options[:4])} --workers {number}",
            (*TITAN, "convert", "auto", str(src), str(out), *options, "--workers", str(number)),
            out,
            most_secs=num_bytes / RATES[kind],
            most_anon_mib=128 + 16 * number,
        )
        for options in cases
        for number in workers
    ]
    ok = compare(copy_and_fsync(src, work / "copy"), commands, rounds=rounds)
    remove(out)
    remove(work / "copy")
    return ok


if __name__ == "__main__":
    main()
