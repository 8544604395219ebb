"""Reshard a training checkpoint from FSDP 4 × TP 2 to FSDP 8, in alternation with `cp -r` + fsync.

python scripts/bench/reshard.py --work /a/disk/with/15/GB --rounds 5

Weights in bf16 and AdamW's moments in fp32, ten bytes for each parameter: Llama 3.2 1B's layers, but only 4 of its 16
and a vocabulary of 32,000, so that a round takes seconds and 3.1 GB; `--layers 16 --vocab 128256` is the 1.2B model.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]
from rounds import TITAN, Command, compare, copy_and_fsync, read_once  # noqa: E402

from converters.common.box import Box  # noqa: E402
from converters.common.dtypes import itemsize, numpy_dtype  # noqa: E402
from converters.containers.dcp_item import blob_item  # noqa: E402
from converters.containers.dcp_write import plan_dcp  # noqa: E402
from converters.conversion.execute import execute  # noqa: E402
from converters.conversion.records import Plan, Run  # noqa: E402
from converters.families.args import ModelArgs  # noqa: E402
from converters.families.llama3 import LLAMA3  # noqa: E402
from converters.layout.layout import boxes_for_mesh  # noqa: E402
from converters.layout.mesh_shape import MeshShape  # noqa: E402
from converters.model.model_info import ModelInfo, write_model_info  # noqa: E402
from converters.views.catalog import TensorInfo  # noqa: E402

FROM, TO = MeshShape(dp_shard=4, tp=2), MeshShape(dp_shard=8)
MOST, MOST_ANON_MIB = 3.0, 128 + 16 * 2  # at the default of two workers


class Noise:
    """A TensorSource of finite random values, each block of them cut from one small pool."""

    def __init__(self, tensors: dict[str, TensorInfo]):
        self.tensors = tensors
        bits = np.random.Generator(np.random.SFC64(0)).integers(0, 1 << 16, (1 << 23) + 4096, dtype=np.uint16)
        self._pool = bits & np.uint16(0xBFFF)  # without the exponent's top bit nothing is infinite, in bf16 and fp32

    def read(self, fqn: str, box: Box) -> np.ndarray:
        dtype = self.tensors[fqn].dtype
        shift = hash((fqn, box.offsets)) % 2048
        raw = self._pool.view(np.uint8)[4 * shift :][: box.num_elements * itemsize(dtype)]
        return raw.view(numpy_dtype(dtype)).reshape(box.sizes)


def write_training_checkpoint(folder: Path, args: ModelArgs) -> int:
    """A step of a run on FROM, as the trainer saves it; its bytes."""
    parameters = LLAMA3.parameters(args)
    tensors = {p.fqn: TensorInfo("bfloat16", p.shape) for p in parameters}
    state = {p.fqn: [f"optimizer.state.{p.fqn}.{kind}" for kind in ("exp_avg", "exp_avg_sq")] for p in parameters}
    for p in parameters:
        tensors |= {name: TensorInfo("float32", p.shape) for name in state[p.fqn]}
        tensors[f"optimizer.state.{p.fqn}.step"] = TensorInfo("float32", ())
    files = boxes_for_mesh(parameters, FROM, itemsizes={p.fqn: 4 for p in parameters})
    held = {f: [(n, box) for fqn, box in boxes for n in (fqn, *state[fqn])] for f, boxes in files.items()}
    held["__0_1.distcp"] = [(name, Box((), ())) for name, info in tensors.items() if not info.shape]
    blobs = {f"optimizer.param_groups.{p.fqn}.lr": blob_item(1e-3) for p in parameters}
    target = plan_dcp(tensors, held, blobs=blobs | {"train_state.step": blob_item(1000)})

    def write_small_files(at: Path) -> list[str]:
        write_model_info(at, ModelInfo("llama3", args))
        return []

    execute(folder, Plan(Noise(tensors), target, write_small_files=write_small_files), Run())
    return target.total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32_000)
    chosen = parser.parse_args()
    args = replace(LLAMA3.flavors["1B"], num_layers=chosen.layers, vocab_size=chosen.vocab)
    with TemporaryDirectory(dir=chosen.work, prefix="titan-bench-") as folder:
        work = Path(folder)
        size = write_training_checkpoint(work / "step-1000", args)
        read_once(work / "step-1000")
        print(f"{size / 1e9:.2f} GB: bf16 weights, fp32 moments, mesh {FROM}", flush=True)
        argv = (*TITAN, "reshard", str(work / "step-1000"), str(work / "out"), "--for-mesh", str(TO))
        command = Command(f"reshard to {TO}", argv, work / "out", MOST, most_anon_mib=MOST_ANON_MIB)
        ok = compare(copy_and_fsync(work / "step-1000", work / "copy"), [command], rounds=chosen.rounds)
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()
