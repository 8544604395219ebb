"""Compare estimates with a real GPU: one rank of an N-GPU job on one device, with a fake process group.

    python scripts/bench/estimate_gpu.py predict predictions.json --gpu h100-80      # anywhere, first
    python scripts/bench/estimate_gpu.py measure predictions.json                    # on the GPU

The predictions' SHA-256 is printed before anything is measured. Kernels, streams and the allocator are the GPU's own;
only NCCL's buffers are missing. Models of 1B and 8B are cut in depth. Every case runs in a process of its own, for two
steps. Limits: allocated 3 % eager and 5 % compiled, reserved 5 %.

A fake collective leaves the memory of its result as it was. If that is NaN, `foreach` and moments in bf16 skip their
update, and the peak lacks it: the line of such a case says so, and is no verdict.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converters.common.sizes import GIB
from converters.families.args import ModelArgs
from converters.families.registry import get_family
from converters.layout.mesh_shape import MeshShape
from trainer.config.load import load_config
from trainer.config.sections import Config
from trainer.job.job import resolve_job
from trainer.job.record import Job
from trainer.ranks.gpus import GPUS

MOST = {"allocated": 0.03, "allocated, compiled": 0.05, "reserved": 0.05}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    flavor: str
    num_layers: int
    world_size: int
    words: str = ""
    allocator: str = "expandable"

    @property
    def config(self) -> Config:
        return load_config(f"llama3_{self.flavor.lower()}", [f"--{word}" for word in self.words.split()])

    @property
    def args(self) -> ModelArgs:
        return replace(get_family("llama3").flavors[self.flavor], num_layers=self.num_layers)

    @property
    def dims(self) -> MeshShape:
        return resolve_job(self.config, world_size=self.world_size).dims

    @property
    def is_compiled(self) -> bool:
        return self.config.compile.enable


NO_AC, FULL = "activation_checkpoint.mode=none", "activation_checkpoint.mode=full"
TP, CP = "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"
PLAIN, COMPILED = "training.loss=plain", "compile.enable"
CASES = [
    Case("1B, one rank's share of 8", "1B", 16, 8),
    Case("1B, classic", "1B", 16, 8, allocator="classic"),
    Case("1B, no checkpointing", "1B", 16, 8, NO_AC),
    Case("1B, full checkpointing", "1B", 16, 8, FULL),
    Case("1B, plain loss", "1B", 16, 8, PLAIN),
    Case("1B, accumulation", "1B", 16, 8, "training.local_batch_size=1 training.global_batch_size=24"),
    Case("1B, HSDP", "1B", 16, 8, "parallelism.data_parallel_replicate_degree=2"),
    Case("1B, TP 2", "1B", 16, 8, f"{TP}=2"),
    Case("1B, CP 2", "1B", 16, 8, f"{CP}=2"),
    Case("1B, foreach", "1B", 16, 8, "optimizer.implementation=foreach"),
    Case("1B, moments in bf16", "1B", 16, 8, "optimizer.state_dtype=bfloat16"),
    Case("1B, CPU offload", "1B", 16, 8, "training.enable_cpu_offload"),
    Case("1B, compiled", "1B", 16, 8, COMPILED),
    Case("1B, compiled, no checkpointing", "1B", 16, 8, f"{COMPILED} {NO_AC}"),
    Case("8B of 8 layers", "8B", 8, 8),
    Case("8B of 8 layers, classic", "8B", 8, 8, allocator="classic"),
    Case("8B of 8 layers, no checkpointing", "8B", 8, 8, NO_AC),
    Case("8B of 8 layers, full checkpointing", "8B", 8, 64, FULL),
    Case("8B of 8 layers, plain loss", "8B", 8, 8, PLAIN),
    Case("8B of 8 layers, always resharded", "8B", 8, 8, "parallelism.fsdp_reshard_after_forward=always"),
    Case("8B of 8 layers, FSDP 8 × TP 8", "8B", 8, 64, f"{TP}=8"),
    Case("8B of 8 layers, compiled", "8B", 8, 8, COMPILED),
    Case("8B of 8 layers, compiled, classic", "8B", 8, 8, COMPILED, "classic"),
    Case("8B of 8 layers, float8 compiled", "8B", 8, 8, f"{COMPILED} model.converters=quantize.linear.float8"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure", "one"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", choices=GPUS, default="h100-80")
    parser.add_argument("--case", action="append", metavar="NAME", help="this case alone; repeatable")
    parser.add_argument("--out", type=Path, help="append every measurement to this file, as a line of JSON")
    chosen = parser.parse_args()
    if unknown := set(chosen.case or ()) - {case.name for case in CASES}:
        parser.error(f"no case is named {', '.join(map(repr, sorted(unknown)))}")
    cases = [case for case in CASES if not chosen.case or case.name in chosen.case]
    if chosen.what == "predict":
        found: dict[str, dict[str, float]] = {}
        for case in cases:
            found[case.name] = predict(case, chosen.gpu)
            chosen.file.write_text(json.dumps(found, indent=2) + "\n")
    elif chosen.what == "one":
        print(json.dumps(measure(cases[0])))
    else:
        raise SystemExit(compare(chosen.file, cases, chosen.out))


def predict(case: Case, gpu: str) -> dict[str, float]:
    """Peaks of the steady step in GiB, as estimated."""
    from titan_tools.memory.expand.ranks import trace_rank
    from titan_tools.memory.replay.replay import replay
    from titan_tools.memory.trace.kernels import gpu_kernels

    print(case.name, file=sys.stderr, flush=True)
    trace = trace_rank(Job.of(case.config, case.args, case.dims), rank=0, kernels=gpu_kernels(GPUS[gpu]))
    peak = replay(trace, allocator=case.allocator).steady
    return {"allocated": peak.allocated_bytes / GIB, "reserved": peak.reserved_bytes / GIB}


def measure(case: Case) -> dict[str, Any]:
    """The same, as the GPU's own allocator counts it over a real run's second step, and whether that had an update."""
    import torch

    from trainer.build import build
    from trainer.data.batch import TokenBatch
    from trainer.optim.optimizer import build_optimizer
    from trainer.parallel.attention_backend import attention_backends
    from trainer.ranks.mesh import make_meshes
    from trainer.ranks.process_group import fake_ranks
    from trainer.step import TrainStep

    config, dims, device = case.config, case.dims, torch.device("cuda", 0)
    training = config.training
    torch.cuda.set_device(device)
    job = Job.of(config, case.args, dims)
    shape = (job.samples_per_step // dims.batch, training.seq_len)
    with fake_ranks(dims.world_size, rank=0), attention_backends(device):
        meshes = make_meshes(dims, "cuda")
        model = build(job, meshes, device)
        model.initialize(0)
        optimizer = build_optimizer(model.named_parameters(), config.optimizer)
        model.follow(optimizer)
        step = TrainStep(model, meshes, max_norm=training.max_norm, local_batch_size=training.local_batch_size)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            ids = torch.zeros(shape, dtype=torch.int64)
            result = step.run(TokenBatch(tokens=ids, targets=ids), optimizer)
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return {
            "allocated": torch.cuda.max_memory_allocated() / GIB,
            "reserved": torch.cuda.max_memory_reserved() / GIB,
            "has_update": result.is_finite,
        }


def compare(file: Path, cases: list[Case], out: Path | None) -> int:
    """Print predicted, measured and the difference; 1 where a limit does not hold."""
    predicted = json.loads(file.read_text())
    print(f"{file.name}: SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}", flush=True)
    missed = 0
    for case in cases:
        setting = f"expandable_segments:{case.allocator == 'expandable'}"
        path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-P", __file__, "one", str(file), "--case", case.name],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTORCH_ALLOC_CONF": setting},
        )
        line: dict[str, Any] = {"case": case.name}
        if done.returncode:
            line["error"] = done.stderr.strip()[-2000:]
        else:
            line |= {"predicted": predicted[case.name], "measured": json.loads(done.stdout.splitlines()[-1])}
            line |= judge(case, line["predicted"], line["measured"])
        missed += not line.get("ok", False)
        print(f"{case.name:40} {line.get('says') or 'failed: ' + line['error'].splitlines()[-1]}", flush=True)
        if out:
            with out.open("a") as results:
                results.write(json.dumps(line) + "\n")
    return int(missed > 0)


def judge(case: Case, predicted: dict[str, float], measured: dict[str, Any]) -> dict[str, Any]:
    """Whether the limits hold, and the differences in words."""
    says, ok = [], True
    for name, size in predicted.items():
        error = size / measured[name] - 1
        most = MOST["allocated, compiled" if name == "allocated" and case.is_compiled else name]
        ok = ok and abs(error) <= most
        says.append(f"{name} {size:.3f} / {measured[name]:.3f} ({error:+.2%}, limit {most:.0%})")
    if not measured["has_update"]:
        return {"ok": True, "says": "  ".join((*says, "the update was skipped: no verdict"))}
    return {"ok": ok, "says": "  ".join((*says, *(() if ok else ("MISSED",))))}


if __name__ == "__main__":
    main()
