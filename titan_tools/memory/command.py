"""What `titan estimate-memory` does: read the config, estimate, print, and give the exit code."""

from collections.abc import Sequence

from converters.errors import ConfigError
from titan_tools.console import print_json, table
from titan_tools.memory import report
from titan_tools.memory.constants import find_gpu
from titan_tools.memory.estimate import Estimate, estimate
from titan_tools.memory.formula.coverage import refuse_gaps
from titan_tools.memory.formula.from_config import run_shape
from titan_tools.memory.verdict import EXIT_CODES
from trainer.config.load import load_config


def estimate_from_command_line(
    config: str, overrides: Sequence[str], *, world_size: int | None, gpu_text: str | None, as_json: bool
) -> int:
    """Print the estimate of a config; 0, or with a GPU type its verdict as exit code.

    Raises ConfigError with everything wrong in flags and layout, UnsupportedError with everything not covered.
    """
    gpu, problems = None, []
    if gpu_text is not None:
        try:
            gpu = find_gpu(gpu_text)
        except ConfigError as error:
            problems.append(f"{error.message}; {error.hint}")
    loaded = load_config(config, overrides)
    run = run_shape(loaded, world_size=world_size, problems=problems)
    refuse_gaps(loaded, run.mesh)
    found = estimate(run, gpu=gpu)
    if as_json:
        print_json(report.as_json(found))
    else:
        _print(found)
    return EXIT_CODES[found.verdicts[0].verdict] if gpu else 0


def _print(found: Estimate) -> None:
    worst = found.worst_rank
    print(f"{report.headline(found)}\n\nPeak allocated per pipeline rank")
    table(report.RANK_COLUMNS, report.rank_rows(found))
    print(f"\nThe peak, pp rank {worst.pp_rank}: {worst.worst.when}")
    table(("what", "GiB", "share"), report.breakdown_rows(worst.worst))
    print("\nVerdict")
    table(report.VERDICT_COLUMNS, report.verdict_rows(found))
    for title, lines in (("Assumptions", found.assumptions), ("Covered", found.covers)):
        print(f"\n{title}")
        for line in lines:
            print(f"- {line}")
