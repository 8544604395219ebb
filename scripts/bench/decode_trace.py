"""Run a `titan infer` command, then record one more decode step of its engine, and write the step's summary as JSON.

python scripts/bench/decode_trace.py OUT infer CHECKPOINT --prompt … [--compile]

The command's own rates are not affected: the profiler starts after its end.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parent))
from step_trace import summarize  # noqa: E402

from titan_tools.__main__ import main as titan  # noqa: E402
from titan_tools.infer.decoding.engine import Engine  # noqa: E402

_WARM_UP_STEPS = 8


def main() -> None:
    out, *sys.argv[1:] = sys.argv[1:]
    engines: list[Engine] = []
    initialize = Engine.__init__

    def keep(self: Engine, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        engines.append(self)

    Engine.__init__ = keep  # type: ignore[method-assign]
    try:
        titan()
    except SystemExit as end:
        if end.code:
            raise
    try:
        summary = last_step(engines[-1])
    except Exception as error:  # the command's result still counts
        summary = {"error": f"{type(error).__name__}: {error}"[:500]}
    Path(out).write_text(json.dumps(summary))


@torch.inference_mode()
def last_step(engine: Engine) -> dict[str, Any]:
    """The summary of a decode step after some others."""
    engine.prefill(0, [1] * 16)
    tokens = [1]
    for _ in range(_WARM_UP_STEPS):
        _, tokens = engine.decode_likeliest(tokens, ahead=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for number in range(2):
            with record_function(f"ProfilerStep#{number}"):
                _, tokens = engine.decode_likeliest(tokens, ahead=True)
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return summarize(json.loads(trace.read_text()))


if __name__ == "__main__":
    main()
