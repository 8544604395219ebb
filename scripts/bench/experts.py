"""Mixtures of experts on a CPU: what all-to-all adds to a step, and grouped products against a loop over experts.

python scripts/bench/experts.py

Two gloo ranks of one thread each take steps with expert parallelism over both, and with the exchange replaced: each
rank's rows go to the experts that it holds, as many rows as before. Rounds alternate; the medians count. The exit code
is 1 where a limit is missed.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from rounds import machine  # noqa: E402

from converters.families.blocks import Experts
from converters.families.qwen3 import QWEN3
from trainer.build import build
from trainer.config.sections import ActivationCheckpoint, Config, Debug, Model, Parallelism, Training
from trainer.data.batch import TokenBatch
from trainer.job.job import resolve_job
from trainer.job.record import Job
from trainer.models.moe import Dispatched, GroupedExperts, LocalDispatch, MoE
from trainer.optim.optimizer import build_optimizer
from trainer.ranks.mesh import make_meshes
from trainer.step import TrainStep

Weights = Tensor | Sequence[Tensor]  # by expert
MOST_OF_A_STEP, LEAST_TIMES = 1.15, 3.0
SEQ_LEN, BATCH = 1024, 2  # of each rank
ARGS = replace(
    QWEN3.flavors["debug_moe"], dim=512, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=64,
    num_experts=64, experts_per_token=8, expert_hidden=768,
)  # fmt: skip


class Here(LocalDispatch):
    """As many rows for as many products, but of the experts on this rank."""

    def forward(self, x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> Dispatched:
        return super().forward(x_TD, ids_TK % (num_experts // dist.get_world_size()), num_experts)

    def compute(self, experts: nn.Module, dispatched: Dispatched) -> Tensor:
        out_RD: Tensor = experts(dispatched.x_RD, dispatched.ends_E[: len(dispatched.ends_E) // dist.get_world_size()])
        return out_RD


def steps_of_a_rank(rank: int, rendezvous: str, rounds: int) -> None:
    """Print the seconds of a step with and without the exchange; rank 0 judges."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    take = {"all-to-all": make_step(is_exchanged=True), "local": make_step(is_exchanged=False)}
    secs: dict[str, list[float]] = {name: [] for name in take}
    for number in range(rounds + 1):
        for name, step in take.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            if number:  # the first warms up
                secs[name].append(time.perf_counter() - started)
    dist.destroy_process_group()
    if rank:
        return
    middle = {name: median(each) for name, each in secs.items()}
    for name, each in secs.items():
        print(f"step, {name:<11} {middle[name]:6.3f} s  ({min(each):.3f}–{max(each):.3f})")
    ratio = middle["all-to-all"] / middle["local"]
    print(f"all-to-all over local dispatch: {ratio:.3f} (at most {MOST_OF_A_STEP})", flush=True)
    sys.exit(0 if ratio <= MOST_OF_A_STEP else 1)


def make_step(*, is_exchanged: bool) -> Callable[[], Any]:
    """A step of training with two expert-parallel ranks, balanced routing and random tokens."""
    config = Config(
        model=Model(name="qwen3", flavor="debug_moe"),
        training=Training(seq_len=SEQ_LEN, local_batch_size=BATCH, mixed_precision_param="float32"),
        parallelism=Parallelism(expert_parallel_degree=2),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        debug=Debug(moe_force_load_balance=True),
    )
    job: Job = resolve_job(config, 2, args=ARGS)
    model = build(job, make_meshes(job.dims, "cpu"), torch.device("cpu"))
    model.initialize(0)
    if not is_exchanged:
        for module in model.parts[0].modules():
            if isinstance(module, MoE):
                module.dispatch = Here()
    step = TrainStep(model, model.meshes, max_norm=1.0, local_batch_size=BATCH)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    tokens = torch.randint(ARGS.vocab_size, (BATCH, SEQ_LEN))

    def run() -> None:
        step.run(TokenBatch(tokens, tokens), optimizer)
        optimizer.zero_grad()

    return run


def grouped_over_loop(rounds: int) -> float:
    """How many times as fast as a loop: forward and backward of 64 experts of 256 × 256, 2048 rows, one thread."""
    torch.set_num_threads(1)
    experts = GroupedExperts(256, Experts(num=64, top_k=8, hidden=256))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    x_RD, ends_E = torch.randn(2048, 256, requires_grad=True), torch.arange(32, 2049, 32, dtype=torch.int32)

    def loop(w1: Weights, w2: Weights, w3: Weights) -> Tensor:
        rows = x_RD.tensor_split(ends_E[:-1].long())
        return torch.cat([(F.silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e].T for e, x in enumerate(rows)])

    stacks = (experts.w1, experts.w2, experts.w3)
    ways: dict[str, Callable[[], Tensor]] = {
        "grouped": lambda: experts(x_RD, ends_E),
        "loop": lambda: loop(*stacks),  # as torchtitan's and transformers': the gradient of each slice is a stack
        "loop, unbound": lambda: loop(*(stack.unbind() for stack in stacks)),
    }
    assert all(torch.allclose(ways["grouped"](), compute(), atol=1e-5) for compute in ways.values())
    secs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, compute in ways.items():
            started = time.perf_counter()
            compute().square().sum().backward()
            secs[name].append(time.perf_counter() - started)
            experts.zero_grad()
    middle = {name: median(each) for name, each in secs.items()}
    times = {name: each / middle["grouped"] for name, each in middle.items()}
    for name, each in middle.items():
        print(f"64 experts, {name:<13} {1e3 * each:6.1f} ms  {times[name]:4.1f} ×")
    print(f"grouped products over the loop: {times['loop']:.1f} × (at least {LEAST_TIMES})", flush=True)
    return times["loop"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(machine(Path(tempfile.gettempdir())))
    is_fast = grouped_over_loop(rounds) >= LEAST_TIMES
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(steps_of_a_rank, (os.path.join(folder, "ranks"), rounds), nprocs=2, join=False)
        try:
            while not context.join():
                pass
        except mp.ProcessExitedException:
            is_fast = False
    raise SystemExit(0 if is_fast else 1)


if __name__ == "__main__":
    main()
