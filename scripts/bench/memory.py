"""Peak anonymous memory of conversions, reshard and verify of a 2.5 GB checkpoint, for 1 to 8 workers.

    python scripts/bench/memory.py --work /a/disk/with/25/GB

The source is sparse and zeros are copied like any other values, so times here mean little; memory is the point. The
limit is 128 MiB and 16 MiB for each worker.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent))
from models import MODELS, write_model  # noqa: E402
from rounds import TITAN, Command, compare, copy_and_fsync  # noqa: E402

VERIFY_READERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None, help="where to write; default: the temporary folder")
    chosen = parser.parse_args()
    with TemporaryDirectory(dir=chosen.work, prefix="titan-bench-") as work:
        ok = compare(*_commands(Path(work)), rounds=1, warmup=0)
    raise SystemExit(0 if ok else 1)


def _commands(work: Path) -> tuple[Command, list[Command]]:
    hf, dcp, back, cut = (work / name for name in ("hf", "dcp", "back", "cut"))
    write_model(hf, MODELS["llama"], sparse=True)

    def titan(name: str, words: Sequence[str | Path], out: Path, workers: int = 2) -> Command:
        return Command(name, (*TITAN, *map(str, words)), out, most_anon_mib=128 + 16 * workers)

    commands = []
    for n in (1, 2, 4, 8):
        options = ("--workers", str(n))
        commands += [
            titan(f"hf-to-dcp, {n} workers", ("convert", "hf-to-dcp", hf, dcp, *options), dcp, n),
            titan(f"dcp-to-hf, {n} workers", ("convert", "dcp-to-hf", dcp, back, *options), back, n),
        ]
    meta, wide = work / "meta", work / "wide"
    mesh = ("--for-mesh", "dp_shard=4,tp=8")
    commands += [
        titan("hf-to-dcp, cut along both dims", ("convert", "hf-to-dcp", hf, cut, *mesh), cut),
        titan("dcp-to-hf of that", ("convert", "dcp-to-hf", cut, back), back),
        titan("dcp-to-meta", ("convert", "dcp-to-meta", dcp, meta), meta),
        titan("hf-to-dcp, cast to float32", ("convert", "hf-to-dcp", hf, wide, "--dtype", "float32"), wide),
        titan("reshard of that", ("reshard", wide, work / "again", "--for-mesh", "tp=4"), work / "again"),
        titan("verify DCP", ("verify", cut), work / "none", VERIFY_READERS),
        titan("verify HF", ("verify", back), work / "none", VERIFY_READERS),
    ]
    return copy_and_fsync(hf, work / "copy"), commands


if __name__ == "__main__":
    main()
