"""Measure what README states, write docs/measured.json, and from that README's table and docs/measured.svg.

python scripts/bench/readme.py --work /a/disk/with/25/GB                  # about ten minutes on two cores
python scripts/bench/readme.py --render                                   # the text and the picture alone

Needs 10 GB of memory, which torchtitan's way takes, and torchtitan 0.2.2 where scripts/test_slow.sh puts it.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from models import DEEPSEEK, LLAMA_1B, write_fp8_model, write_model  # noqa: E402
from rounds import ROOT, TITAN, Command, compare, copy_and_fsync, machine, read_once, run  # noqa: E402

MEASURED, PICTURE, README = ROOT / "docs" / "measured.json", ROOT / "docs" / "measured.svg", ROOT / "README.md"
BEGIN, END = "<!-- measured: written by scripts/bench/readme.py -->\n", "<!-- end of measured -->"
LLAMA = {**LLAMA_1B, "tie_word_embeddings": False}  # torchtitan's Llama has no tied embeddings
PUBLISHED = {  # of torchtitan#1690, by its git log: Qwen 3 32B on 16 H100, FSDP, 4 × 4096 tokens, full checkpointing
    "reserved_gib": 78.48,
    "options": (
        "qwen3_32b --world-size 16 --training.local_batch_size 4 --training.seq_len 4096"
        " --activation_checkpoint.mode full --compile.no_enable --training.loss plain"
    ),
}
PEERS = {
    "transformers": "transformers, `dcp.save`",
    "torchtitan": "torchtitan's `convert_from_hf.py`",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=MEASURED, help="where the numbers go")
    parser.add_argument("--render", action="store_true", help="measure nothing; write README's table and the picture")
    given = parser.parse_args()
    if not given.render:
        with TemporaryDirectory(dir=given.work, prefix="titan-bench-") as work:
            given.json.write_text(json.dumps(measure(Path(work), given.rounds), indent=1) + "\n")
    if given.json == MEASURED:
        measured = json.loads(MEASURED.read_text())
        before, rest = README.read_text().split(BEGIN)
        README.write_text(before + BEGIN + table(measured) + END + rest.split(END)[1])
        PICTURE.write_text(picture(measured))


def measure(work: Path, rounds: int) -> dict[str, Any]:
    packages = ("titan-tools", "torch", "transformers")
    return {
        "date": date.today().isoformat(),
        "machine": machine(work / "x"),
        "versions": {name: version(name) for name in packages} | {"torchtitan": "0.2.2"},
        "conversion": _conversion(work, rounds),
        "fp8": _fp8(work),
        "greedy": _greedy(work),
        "estimates": _estimates(work),
    }


def _conversion(work: Path, rounds: int) -> dict[str, Any]:
    """Hugging Face to DCP: seconds and memory of `cp`, titan and two others, in alternation."""
    hf, out = work / "hf", work / "out"
    size = write_model(hf, LLAMA, normal=True)
    read_once(hf)
    peers = str(Path(__file__).with_name("convert_peers.py"))
    commands = [Command("titan", (*TITAN, "convert", "hf-to-dcp", str(hf), str(out)), out)]
    commands += [Command(name, (sys.executable, peers, name, str(hf), str(out)), out) for name in PEERS]
    copy = copy_and_fsync(hf, work / "copy")
    compare(copy, commands, rounds=rounds)
    everything = {"cp": copy} | {command.name: command for command in commands}
    shutil.rmtree(hf)
    return {
        "source_gb": size / 1e9,
        "rounds": rounds,
        "seconds": {name: sorted(each.secs)[rounds // 2] for name, each in everything.items()},
        "peak_mib": {name: each.anon_mib for name, each in everything.items()},
    }


def _fp8(work: Path) -> dict[str, Any]:
    """fp8 to a DCP of bfloat16 and back to fp8 with the scales of the source: are the tensors' bytes the same?"""
    hf, dcp, back = work / "fp8", work / "fp8-dcp", work / "fp8-back"
    size = write_fp8_model(hf, {**DEEPSEEK, "n_routed_experts": 16})
    _titan("convert", "hf-to-dcp", hf, dcp)
    secs, anon = run(
        Command(
            "", (*TITAN, *map(str, ("convert", "dcp-to-hf", dcp, back, "--quantize", "fp8", "--scales-from", hf))), back
        )
    )
    before, after = _tensors(hf), _tensors(back)
    for folder in (hf, dcp, back):
        shutil.rmtree(folder)
    different = sum(before[name] != after.get(name) for name in before) + len(after.keys() - before.keys())
    return {"source_gb": size / 1e9, "tensors": len(before), "different": different, "seconds": secs, "peak_mib": anon}


def _tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Dtype and digest of every tensor, by the safetensors library."""
    from hashlib import blake2b

    import torch
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                tensor = file.get_tensor(name)
                found[name] = str(tensor.dtype), blake2b(tensor.view(torch.uint8).numpy()).digest()
    return found


def _greedy(work: Path) -> dict[str, Any]:
    """Greedy tokens of titan on two ranks and of transformers, in float32."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    data, hf, asked, said = work / "data", work / "small", work / "asked.jsonl", work / "said.jsonl"
    _titan("data", "prepare", "--out", data, "--max-bytes", 2_000_000)
    tokenizer = AutoTokenizer.from_pretrained(data)
    torch.manual_seed(0)
    small = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=8, initializer_range=0.08, **small)
    model = LlamaForCausalLM(config)
    model.save_pretrained(hf)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / name, hf)
    lines = [line for line in (ROOT / "titan_tools" / "cli.py").read_text().splitlines() if len(line) > 30][:64]
    asked.write_text("".join(json.dumps({"id": n, "prompt": line}) + "\n" for n, line in enumerate(lines)))
    options = (
        "--tp",
        2,
        "--dtype",
        "float32",
        "--ignore-eos",
        "--max-new-tokens",
        64,
        "--batch",
        asked,
        "--out",
        said,
        "--logprobs",
        0,
    )
    _titan("infer", hf, *options)
    results = [json.loads(line) for line in said.read_text().splitlines()]
    different = 0
    for line, result in zip(lines, results, strict=True):
        tokens = torch.tensor([tokenizer(line).input_ids])
        made = model.generate(tokens, do_sample=False, max_new_tokens=64, eos_token_id=None, pad_token_id=0)
        expected = made[0, tokens.shape[1] :].tolist()
        ours = [each["token"] for each in result["logprobs"]]
        different += sum(a != b for a, b in zip(expected, ours, strict=True))
    return {"tokens": 64 * len(lines), "different": different, "ranks": 2}


def _estimates(work: Path) -> dict[str, Any]:
    """Peak memory of a published run; and whether 405B fits on 512 GPUs."""
    found = {}
    for name, options in (("published", PUBLISHED["options"]), ("405b", "llama3_405b --world-size 512")):
        command = Command("", (*TITAN, "estimate-memory", *str(options).split(), "--json"), work / "none")
        secs, anon = run(command)
        page = json.loads(_titan(*command.argv[len(TITAN) :]))
        found[name] = {"reserved_gib": page["peak"]["reserved_gib"], "seconds": secs, "peak_mib": anon}
    return found | {"published_gib": PUBLISHED["reserved_gib"]}


def _titan(*words: object) -> str:
    done = subprocess.run([*TITAN, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"titan {' '.join(map(str, words))}\nended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def table(measured: Mapping[str, Any]) -> str:
    """README's table, in Markdown."""
    conversion, fp8, greedy, estimates = (measured[key] for key in ("conversion", "fp8", "greedy", "estimates"))
    secs, mib = conversion["seconds"], conversion["peak_mib"]

    def cost(name: str) -> str:
        return f"{secs[name]:.1f} s, {_memory(mib[name])}"

    def estimated(found: Mapping[str, float]) -> str:
        return f"**{found['reserved_gib']:.2f} GiB** in {found['seconds']:.0f} s, {_memory(found['peak_mib'])}"

    published, large = estimates["published"], estimates["405b"]
    deviation = published["reserved_gib"] / estimates["published_gib"] - 1
    peers = "; ".join(f"{label}: {cost(name)}" for name, label in PEERS.items())
    rows = [
        ("", "titan", "beside it"),
        ("---", "---", "---"),
        (
            f"Hugging Face → DCP, {conversion['source_gb']:.1f} GB of bf16: time, memory",
            f"**{cost('titan')}**",
            f"`cp -r` + fsync: {secs['cp']:.1f} s; {peers}",
        ),
        (
            f"fp8 → bf16 DCP → fp8, {fp8['source_gb']:.1f} GB with DeepSeek V3's shapes",
            f"**{fp8['tensors'] - fp8['different']:,} of {fp8['tensors']:,} tensors equal byte for byte**",
            f"the way back: {fp8['seconds']:.1f} s, {_memory(fp8['peak_mib'])}",
        ),
        (
            f"{greedy['tokens']:,} greedy tokens on {greedy['ranks']} ranks, float32",
            f"**{greedy['different']:,} differ**",
            "transformers' `generate`, one process",
        ),
        (
            "Peak memory of Qwen 3 32B on 16 H100, without a GPU",
            estimated(published),
            f"published by torchtitan: {estimates['published_gib']} GiB ({100 * deviation:+.1f} %)",
        ),
        (
            "Does Llama 3.1 405B fit on 512 GPUs of 80 GB?",
            estimated(large),
            "a traced train step, not a formula",
        ),
    ]
    where = measured["machine"]
    cpu = re.sub(r" [0-9]+-Core.*", "", where["cpu"])
    note = (
        f"{where['cores']} cores ({cpu}), {where['memory_gib']:.0f} GiB, no GPU;"
        f" torch {measured['versions']['torch']}; titan {measured['versions']['titan-tools']}, {measured['date']}."
        " Memory is anonymous memory: the file that transformers maps is not in it. torchtitan's script writes float32."
    )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + f"\n{note}\n"


def _memory(mib: float) -> str:
    return f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"


def picture(measured: Mapping[str, Any]) -> str:
    """Time and memory of the conversions, as bars; SVG text that is read on light and dark pages."""
    conversion = measured["conversion"]
    names = {
        "cp": "cp -r + fsync",
        "titan": "titan convert",
        "transformers": "transformers",
        "torchtitan": "torchtitan",
    }
    panels = (("seconds", conversion["seconds"], "{:.1f} s"), ("peak memory", conversion["peak_mib"], ""))
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 176"'
        ' font-family="system-ui, sans-serif" font-size="14">',
        f"<title>Hugging Face to DCP, {conversion['source_gb']:.1f} GB: time and memory</title>",
        "<style>text{fill:#24292f}.own{fill:#7c4dff}.other{fill:#9aa4b2}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}</style>",
    ]
    for column, (title, values, form) in enumerate(panels):
        left, width = (130, 180) if column == 0 else (470, 180)
        parts.append(f'<text x="{left}" y="20" font-weight="600">{title}</text>')
        for row, (name, label) in enumerate(names.items()):
            y = 36 + 34 * row
            length = max(1.5, width * values[name] / max(values.values()))
            shown = form.format(values[name]) if form else _memory(values[name])
            kind = "own" if name == "titan" else "other"
            if column == 0:
                weight = ' font-weight="600"' if kind == "own" else ""
                parts.append(f'<text x="120" y="{y + 16}" text-anchor="end"{weight}>{label}</text>')
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="22" rx="3" class="{kind}"/>')
            parts.append(f'<text x="{left + length + 8:.1f}" y="{y + 16}">{shown}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
