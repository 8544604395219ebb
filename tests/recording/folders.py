"""Folders that titan wrote at commit cd8585c, and what becomes of them: read, verified, resumed to the end.

`folders.tar.xz` holds a conversion's complete outputs, one that was killed, training runs that were killed (after a
save, after an asynchronous save, during one) and a batch of inference that was killed. Folders written before a change
must stay readable after it, so the archive is made once; a later format gets one of its own beside it. The code that
killed runs and wrote the archive is in the history of this file.
"""

import fcntl
import json
import os
import platform
import shutil
import sys
import tarfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.recording.running import file_digests, record_command, titan
from tests.recording.sources import LLAMA, text, write_hf

ARCHIVE = Path(__file__).resolve().parent / "recorded" / "folders.tar.xz"
# An unfinished output belongs to a source by that folder's absolute path and its files' times: both are fixed.
FIXED = Path("/tmp/titan-recording-fixed")
MTIME_NS = 1_700_000_000_000_000_000
CONVERT = ("convert", "auto", str(FIXED / "source"), "out", "--to", "dcp", "--for-mesh", "dp_shard=3", "--json")
STEPS = 12
CONFIG = f"""
[model]
flavor = "recorded"
hf_assets_path = "data"
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
[training]
dataset = "tokens"
dataset_path = "data"
local_batch_size = 2
global_batch_size = 4
seq_len = 32
steps = {STEPS}
loss_chunks = 8
mixed_precision_param = "float32"
[checkpoint]
enable = true
interval = 2
keep_latest_k = 0
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[debug]
seed = 7
[validation]
enable = true
dataset = "tokens"
dataset_path = "data"
local_batch_size = 2
seq_len = 32
freq = 4
steps = 2
"""
ASYNC = ("--checkpoint.async_mode", "async")
RUNS = {"stopped": (), "async": (*ASYNC, "--checkpoint.interval", "4"), "interrupted": ASYNC}  # dump folder → options
PROMPTS = [{"id": n, "prompt": "abc" * (n + 1)} for n in range(6)]
BATCHES = {  # results → options
    "greedy.jsonl": ("--max-new-tokens", "12", "--batch-size", "2"),
    "sampled.jsonl": (
        "--max-new-tokens",
        "8",
        "--temperature",
        "0.8",
        "--seed",
        "3",
        "--samples",
        "2",
        "--batch-size",
        "2",
    ),
    "scored.jsonl": ("--score",),
}


def train(dump: str, *options: str) -> tuple[str, ...]:
    return ("train", "run.toml", "--job.dump_folder", dump, *options)


def infer(out: str, options: tuple[str, ...]) -> tuple[str, ...]:
    return ("infer", "out-hf", "--batch", "prompts.jsonl", "--out", out, *options)


def in_fork(*arguments: str) -> int:
    """The exit code of a command line in a process of its own, the only rank where it trains; negative for a signal."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            if arguments[0] == "train":
                _add_flavor()
                os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
                os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
            code, _, err = titan(*arguments)
            if code:
                print(err, file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _add_flavor() -> None:
    """A model whose checkpoints take 100 KB."""
    from converters.families.registry import get_family

    flavors = get_family("llama3").flavors
    numbers = {"dim": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "ffn_hidden": 16}
    flavors["recorded"] = replace(flavors["debug_gqa"], **numbers, vocab_size=290)


def _write_inputs(place: Path) -> None:
    """What the commands below read, in `place` and in FIXED."""
    (place / "run.toml").write_text(CONFIG)
    (place / "text.txt").write_text(text())
    (place / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    write_hf(FIXED / "source", LLAMA, num_files=2)
    for path in (FIXED / "source").iterdir():
        os.utime(path, ns=(MTIME_NS, MTIME_NS))


@contextmanager
def _fixed_place() -> Iterator[None]:
    """FIXED for this process alone; it is removed afterwards."""
    with open(f"{FIXED}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(FIXED, ignore_errors=True)
        FIXED.mkdir()
        yield
        shutil.rmtree(FIXED)


def _saved(dump: str) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in Path(dump, "checkpoint").glob("step-*"))


def _num_steps(dump: str) -> int:
    path = Path(dump, "metrics.jsonl")
    return path.read_text().count('"loss"') if path.exists() else 0


# What becomes of them


def record_folders(root: Path) -> dict[str, Any]:
    """What today's code does with the archive's folders, and what it writes where nothing was there before.

    `bits` are digests that depend on the kind of machine; see `on_this_machine`.
    """
    import torch.distributed  # once, for all forks

    machine = {"torch": torch.__version__, "machine": platform.machine()}
    machine["kernels"] = torch.backends.cpu.get_cpu_capability()
    found: dict[str, Any] = {"machine": machine}
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    with chdir(root), _fixed_place():
        _write_inputs(root)
        read = ["out-hf", "out-dcp", *(str(path) for path in sorted(Path().glob("*/checkpoint/step-*")))]
        for path in read:
            for command in (("verify",), ("verify", "--quick"), ("inspect",)):
                found[f"{' '.join(command)} {path}"] = record_command(
                    root / "nothing", root, *command, f"../{path}", "--json"
                )
        for dump in RUNS:
            found[f"inspect {dump}"] = record_command(root / "nothing", root, "inspect", f"../{dump}", "--json")
            found[f"verify {dump}"] = record_command(root / "nothing", root, "verify", f"../{dump}", "--json")
        newest = f"../stopped/checkpoint/step-{_saved('stopped')[-1]}"
        found["reshard a training checkpoint"] = record_command(
            root / "resharded", root, "reshard", newest, "out", "--for-mesh", "dp_shard=2", "--json"
        )
        found["convert a training checkpoint"] = record_command(
            root / "converted", root, "convert", "dcp-to-hf", newest, "out", "--json"
        )
        found |= _record_conversion(root) | _record_training() | _record_batches()
    return found


def on_this_machine(found: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """`found`, where the recording was made on another kind of machine with what may differ as it is recorded.

    With the same version of torch, and ENVIRONMENT's kernels, a resumed run gives the same bits: everything counts.
    Elsewhere the digests of weights and of generated text are no evidence, and losses count up to 1e-5: a run must
    still resume at the right step, with the right data, weights and optimizer.
    """
    if found["machine"] == recorded["machine"]:
        return found

    def adapt(here: Any, there: Any, key: str) -> Any:
        if key in ("machine", "bits"):
            return there
        if isinstance(here, dict) and isinstance(there, dict):
            return {name: adapt(value, there.get(name), name) for name, value in here.items()}
        is_close = isinstance(here, float) and isinstance(there, float) and abs(here - there) <= 1e-5
        return there if is_close else here

    return adapt(found, recorded, "")


def _record_conversion(root: Path) -> dict[str, Any]:
    """The killed conversion resumed, and one from the beginning: both write the same bytes."""
    killed = root / "killed"
    killed.mkdir()
    for path in root.glob(".tmp-*"):
        path.rename(killed / path.name)
    return {
        "convert --resume a killed conversion": record_command(killed, root, *CONVERT, "--resume"),
        "convert from the beginning": record_command(root / "whole", root, *CONVERT),
    }


def _record_training() -> dict[str, Any]:
    """Each killed run resumed, and one from the beginning: losses and last checkpoint are the same."""
    found = {}
    for dump, options in {**RUNS, "whole": ()}.items():
        before = _num_steps(dump)
        name = "train from the beginning" if dump == "whole" else f"train resumes {dump}"
        code = in_fork(*train(dump, *options))
        records = [json.loads(line) for line in Path(dump, "metrics.jsonl").read_text().splitlines()]
        found[name] = {
            "exit": code,
            "step before": before,
            "json": sorted({key for record in records for key in record}),
            "resumed from": [record["resumed_from"] for record in records if "resumed_from" in record],
            "tokens": {str(r["step"]): r["ntokens_seen"] for r in records if "ntokens_seen" in r},
            "losses": {str(r["step"]): r["loss"] for r in records if "loss" in r},
            "checkpoints": sorted(os.listdir(f"{dump}/checkpoint")),
            "bits": file_digests(Path(dump, "checkpoint", f"step-{STEPS}"), Path.cwd()),
        }
    return found


def _record_batches() -> dict[str, Any]:
    """Each killed batch of inference resumed, and one from the beginning: the results are the same file."""
    found = {}
    for out, options in BATCHES.items():
        for name, path in ((f"infer resumes {out}", out), (f"infer {out} from the beginning", f"whole-{out}")):
            before = Path(path).read_text().count("\n") if Path(path).exists() else 0
            code = in_fork(*infer(path, options))
            results = [json.loads(line) for line in Path(path).read_text().splitlines()]
            found[name] = {
                "exit": code,
                "results before": before,
                "json": sorted({key for result in results for key in result}),
                "ids": [result["id"] for result in results],
                "bits": sha256(Path(path).read_bytes()).hexdigest(),
            }
    return found
