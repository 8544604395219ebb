"""Print a short table of the results that scripts/bench/gpu.sh has written into a folder.

python scripts/bench/gpu_summary.py FOLDER
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> None:
    folder = Path(sys.argv[1])
    for line in summary(folder):
        print(line)


def summary(folder: Path) -> list[str]:
    """The lines of the table: what was measured, then what failed or was left out."""
    lines = [line for result in read_lines(folder / "results.jsonl") for line in describe(result)]
    tests = read_lines(folder / "tests.jsonl")
    if tests:
        counts = Counter(test["outcome"] for test in tests)
        lines.append(f"{'tests':10}" + ", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    for test in tests:
        if test["outcome"] == "failed":
            lines.append(f"{'':10}{test['test'].removeprefix('tests/gpu/')}: {main_line(test.get('error', ''))}")
    for part in read_lines(folder / "parts.jsonl"):
        how = part.get("skipped") or ("ended" if part["exit"] == 0 else f"FAILED with exit code {part['exit']}")
        secs = f", {part['secs']} s" if "secs" in part else ""
        lines.append(f"{'part':10}{part['part']}: {how}{secs}")
    return lines


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file; a last one that a kill cut is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def describe(result: dict[str, Any]) -> list[str]:
    """The lines of one result: of ceilings.py, train.py, infer.py or estimate_gpu.py. Their own summaries have none."""
    if "what" in result:
        rate = f"{result['tflops']:.0f} TFLOP/s" if "tflops" in result else f"{result['gb_per_sec']:.0f} GB/s"
        return [f"{'ceiling':10}{result['what']:58} {rate:>14}  {result.get('kernel', '')}".rstrip()]
    if "torch" in result and "machine" in result:
        return [f"{'machine':10}{'; '.join(result['machine'].get('gpus', ['no GPU']))}; torch {result['torch']}"]
    name = result.get("row") or result.get("case")
    if name is None:
        return []
    if "error" in result:
        return [f"{'FAILED':10}{name}: {main_line(result['error'])}"]
    if "case" in result:
        return [f"{'estimate':10}{name:44} {result['says']}"]
    if "ttft_ms" in result:
        share = f"  {result['bandwidth_share']:.1%} of the data sheet's" if result.get("bandwidth_share") else ""
        rate = f"{result.get('decode_per_sec') or 0:.1f} tokens/s, {result.get('bandwidth_gb_per_sec') or 0:.0f} GB/s"
        first = f"  first token {result['ttft_ms']:.0f} ms"
        return [f"{'decode':10}{name:44} {rate}{share}{first}", *describe_step(result.get("step", {}))]
    mfu = f"  MFU {result['mfu']:.1%}" if result.get("mfu") else ""
    memory = f"  {result['memory_gib']:.1f} GiB" if result.get("memory_gib") else ""
    first = f"  first step {result['first_step_secs']:.1f} s"
    line = f"{'train':10}{name:44} {result['tokens_per_sec']:,.0f} tokens/s{mfu}{memory}{first}"
    return [line, *describe_step(result.get("step", {}))]


def describe_step(step: dict[str, Any]) -> list[str]:
    """The line of a step's trace on a GPU, if there is one."""
    if "idle_share" not in step:
        return []
    kinds = ", ".join(f"{kind} {ms:.3g} ms" for kind, ms in step.get("ms_by_kind", {}).items())
    return [f"{'':10}step {step['step_ms']:.3g} ms, idle {step['idle_share']:.1%}: {kinds}"]


def main_line(text: str) -> str:
    """The line of an error that says most: pytest's first, else the last that names an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line[1:].strip() for line in lines if line.startswith("E ")]
    named = [line for line in lines if line.startswith("error:") or "Error" in line]
    return (raised[:1] or (named or lines or [""])[-1:])[0][:150]


if __name__ == "__main__":
    main()
