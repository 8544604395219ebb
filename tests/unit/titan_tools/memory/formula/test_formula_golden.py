"""The closed form on the layouts that slow tests hold to the traced step: a change of a formula is seen at once.

`python tests/unit/titan_tools/memory/formula/test_formula_golden.py` writes them anew, after
`pytest -m slow tests/unit/titan_tools/memory/test_engines.py tests/unit/titan_tools/memory/test_engines_compiled.py`.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.unit.titan_tools.memory.test_engines import QUICK, THOROUGH
from tests.unit.titan_tools.memory.test_engines_compiled import COMPILE, COMPILED, FLOAT8, IN_FLOAT8
from titan_tools.memory.formula.closed_form import instants
from titan_tools.memory.formula.run_shape import run_shape
from trainer.config.load import load_config
from trainer.gpus import GPUS
from trainer.job import resolve_job

GOLDEN = Path(__file__).parents[4] / "golden" / "memory_formula.txt"
ABOUT = """\
# Written by tests/unit/titan_tools/memory/formula/test_formula_golden.py. A steady step on h100-80, all stages:
# preset, ranks, overrides | bytes at the peak | bytes of all instants added up, so that lower ones are seen too
"""
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
        sizes = [
            instant.total_bytes
            for pp_rank in range(run.mesh.pp)
            for instant in instants(run, pp_rank=pp_rank, gpu=GPUS["h100-80"])
        ]
        yield f"{preset} {world_size} {words.strip()} | {max(sizes)} | {sum(sizes)}\n"


def test_formulas_give_what_they_gave_when_both_engines_were_compared():
    assert list(lines()) == GOLDEN.read_text().removeprefix(ABOUT).splitlines(keepends=True)


if __name__ == "__main__":
    GOLDEN.write_text(ABOUT + "".join(lines()))
