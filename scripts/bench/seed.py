"""Seed a model of 70B's real dims, as many layers as the disk has room for: seconds, bytes a second, peak memory.

python scripts/bench/seed.py --work /a/disk/with/room --layers 8

The flavor is a user's own, registered by the module that `experimental.custom_import` names; nothing else is special.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

sys.path.insert(0, str(Path(__file__).parent))
from rounds import TITAN, Command, machine, run  # noqa: E402

LAYER_BYTES = 2 * 855_654_400  # bf16
REST_BYTES = 2 * 2 * 128_256 * 8_192  # embedding and output
MOST_LAYERS, MOST_MIB = 80, 2048
CONFIG = """
[model]
name = "llama3"
flavor = "70B cut short"

[training]
dtype = "bfloat16"
seq_len = 8192
local_batch_size = 1

[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 8

[experimental]
custom_import = {module!r}
"""
MODULE = """
from dataclasses import replace

from converters.families.llama3 import LLAMA3
from converters.families.registry import register

cut_short = replace(LLAMA3.flavors["70B"], num_layers={layers})
register(replace(LLAMA3, flavors={{**LLAMA3.flavors, "70B cut short": cut_short}}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(gettempdir()), help="where to write")
    parser.add_argument("--layers", type=int, default=None, help="default: half of the free disk, 80 at most")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    room = shutil.disk_usage(chosen.work).free // 2 - REST_BYTES
    layers = chosen.layers or max(1, min(MOST_LAYERS, room // LAYER_BYTES))
    with TemporaryDirectory(dir=chosen.work, prefix="titan-bench-") as folder:
        work = Path(folder)
        (work / "cut_short.py").write_text(MODULE.format(layers=layers))
        (work / "seed.toml").write_text(CONFIG.format(module=str(work / "cut_short.py")))
        argv = (*TITAN, "seed", str(work / "seed.toml"), str(work / "out"), "--workers", str(chosen.workers))
        secs, anon_mib = run(Command("seed", argv, work / "out"))
        size = sum(path.stat().st_size for path in (work / "out").rglob("*") if path.is_file())
        ok = anon_mib <= MOST_MIB
        print(f"70B's dims, {layers} of {MOST_LAYERS} layers: {size / 1e9:.1f} GB of bf16 for dp_shard=8,tp=8")
        print(
            f"{secs:.1f} s, {size / secs / 1e9:.2f} GB/s; at most {anon_mib:.0f} MiB anonymous, of {MOST_MIB} allowed"
        )
        result = {"ok": ok, "layers": layers, "bytes": size, "secs": round(secs, 2), "anon_mib": round(anon_mib, 1)}
        print(json.dumps(result | {"machine": machine(work / "out")}))
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()
