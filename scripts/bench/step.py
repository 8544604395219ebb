"""A step of `titan train` against a bare loop of the same model: how much the trainer adds, on one rank.

python scripts/bench/step.py --pairs 12

One process holds both. Each pair is a step of the trainer's own loop, data, clipping, update and report included, and a
step of ten lines of PyTorch on the same batch: forward, F.cross_entropy, backward, clip_grad_norm_, AdamW. They
alternate, so that both see the same machine; the minimum of each is compared. The trainer's may be 3 % longer.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent))
from rounds import ROOT, machine  # noqa: E402

sys.path.insert(0, str(ROOT))
MOST, LEAST_SECS, WARMUP = 1.03, 0.3, 3
CONFIG = """
[job]
dump_folder = "run"
[model]
flavor = "debugmodel"
[training]
dataset = "tokens"
dataset_path = "data"
local_batch_size = {batch}
seq_len = 256
steps = {steps}
loss = "{loss}"
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="samples of 256 tokens")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    ok = True
    for loss in ("plain", "chunked"):
        with TemporaryDirectory(prefix="titan-bench-") as work:
            os.chdir(work)
            ok &= _compare(loss, pairs=chosen.pairs, batch=chosen.batch)
            os.chdir(ROOT)
    raise SystemExit(0 if ok else 1)


def _compare(loss: str, *, pairs: int, batch: int) -> bool:
    import torch.distributed as dist

    from trainer import train as loop
    from trainer.config.load import load_config
    from trainer.data.prepare import prepare
    from trainer.job.job import resolve_job
    from trainer.next_token import data
    from trainer.ranks.process_group import Ranks, join_ranks
    from trainer.ranks.signals import StopRequest

    prepare([ROOT / "converters", ROOT / "README.md"], Path("data"), vocab_size=2048, held_out=0.01)
    Path("job.toml").write_text(CONFIG.format(batch=batch, steps=pairs + WARMUP + 1, loss=loss))
    config = load_config("job.toml")
    secs: dict[str, list[float]] = {"trainer": [], "bare": []}
    bare_step = _bare_step()

    class AlternatingLoader:
        """The trainer's batches; after each of its steps the bare loop does one on the same batch."""

        def __init__(self, loader):
            self._loader = loader

        def __iter__(self):
            batches = iter(self._loader)
            while True:
                started = time.perf_counter()
                batch = next(batches)
                yield batch  # the trainer's whole step happens here
                secs["trainer"].append(time.perf_counter() - started)
                started = time.perf_counter()
                bare_step(batch)
                secs["bare"].append(time.perf_counter() - started)

        def __getattr__(self, name):
            return getattr(self._loader, name)

    whole_loader, data.train_loader = (
        data.train_loader,
        lambda *args, **keys: AlternatingLoader(whole_loader(*args, **keys)),
    )
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    try:
        if not dist.is_initialized():
            ranks: Ranks = join_ranks(init_timeout_secs=60)
        loop.train(resolve_job(config, 1), ranks, StopRequest())
    finally:
        data.train_loader = whole_loader
        dist.destroy_process_group()

    ours, bare = (min(taken[WARMUP:]) for taken in (secs["trainer"], secs["bare"]))
    ok = ours <= MOST * bare and bare >= LEAST_SECS
    print(f"{loss:8} bare loop {bare * 1e3:7.1f} ms   titan train {ours * 1e3:7.1f} ms   {ours / bare - 1:+.1%}")
    print(json.dumps({"ok": ok, "loss": loss, "ratio": ours / bare, "machine": machine(Path.cwd()), "secs": secs}))
    return ok


def _bare_step():
    """The same model trained without checkpoints, ranks and logs."""
    import torch
    import torch.nn.functional as F

    from converters.families.llama3 import FLAVORS
    from trainer.models.decoder import Transformer

    model = Transformer(FLAVORS["debugmodel"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(batch) -> float:
        logits = model(batch.tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
