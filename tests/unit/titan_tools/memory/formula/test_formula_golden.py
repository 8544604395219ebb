"""The closed form on the layouts that slow tests hold to the traced step: a change of a formula is seen at once.

`python tests/unit/titan_tools/memory/formula/test_formula_golden.py` writes them anew, after
`pytest -m slow tests/unit/titan_tools/memory/test_engines.py tests/unit/titan_tools/memory/test_engines_compiled.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.unit.titan_tools.memory.test_engines import QUICK, THOROUGH
from tests.unit.titan_tools.memory.test_engines_compiled import COMPILE, COMPILED, FLOAT8, IN_FLOAT8
from titan_tools.memory.formula.closed_form import instants
from titan_tools.memory.formula.run_shape import RunShape, run_shape
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import GPUS

GOLDEN = Path(__file__).parents[4] / "golden" / "memory_formula.txt"
ABOUT = """\
# Written by tests/unit/titan_tools/memory/formula/test_formula_golden.py. A steady step on h100-80, all stages:
# preset, ranks, overrides | bytes at the peak | bytes of all instants added up, so that lower ones are seen too
# Second line, where it differs: as torch does from 2.15 on.
"""

# What RunShape follows of the installed torch
TORCHS = [{"keeps_buffers": True, "sums_at_once": False}, {"keeps_buffers": False, "sums_at_once": True}]
LAYOUTS = [
    *QUICK,
    *THOROUGH,
    *((preset, ranks, f"{COMPILE} {words}") for preset, ranks, words in COMPILED),
    *((preset, ranks, f"{FLOAT8} {words}") for preset, ranks, words in IN_FLOAT8),
]


def lines() -> Iterator[str]:
    for preset, world_size, words in LAYOUTS:
        if preset == "llama3_405b" and "pipeline" in words:  # half a second each, for what smaller ones show
            continue
        run = run_shape(resolve_job(load_config(preset, words.split()), world_size=world_size))
        found = dict.fromkeys(_sizes(replace(run, **torch)) for torch in TORCHS)
        for highest, total in found:
            yield f"{preset} {world_size} {words.strip()} | {highest} | {total}\n"


def _sizes(run: RunShape) -> tuple[int, int]:
    found = [i for pp_rank in range(run.mesh.pp) for i in instants(run, pp_rank=pp_rank, gpu=GPUS["h100-80"])]
    total = sum(instant.total_bytes for instant in found)
    if not run.keeps_buffers:  # versions of torch differ in how early a rank receives
        total -= sum(instant.parts.get("pipeline_buffers", 0) for instant in found)
    return max(instant.total_bytes for instant in found), total


def test_formulas_give_what_they_gave_when_both_engines_were_compared():
    assert list(lines()) == GOLDEN.read_text().removeprefix(ABOUT).splitlines(keepends=True)


if __name__ == "__main__":
    GOLDEN.write_text(ABOUT + "".join(lines()))
