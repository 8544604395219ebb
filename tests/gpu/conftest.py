"""Order of the GPU tests, most valuable first, and their outcomes in a file as they come.

A serial run takes half an hour: on a machine that is lent for minutes, what may be silently wrong is tested first.
"""

import json
import os

_ORDER = (
    *("test_moe", "test_cuda", "test_llama_shapes", "test_context", "test_step", "test_training", "test_documents"),
    *("test_windows", "test_infer", "test_fp8_blocks", "test_latent_attention", "test_infer_windows"),
    *("test_infer_experts", "test_pinned", "test_checkpoint_staging", "test_infer_memory"),
)


def pytest_collection_modifyitems(items):
    """Files in the order above, a new one last; other folders' tests before them, as they were."""
    places = {name: number for number, name in enumerate(_ORDER)}
    items.sort(key=lambda item: places.get(item.path.stem, len(_ORDER)) if item.path.parent.name == "gpu" else -1)


def pytest_runtest_logreport(report):
    """Append a line of JSON to the file PYTEST_OUTCOMES. Under xdist the controller hears of all tests."""
    file = os.environ.get("PYTEST_OUTCOMES")
    if not file or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "when": report.when, "secs": round(report.duration, 1)}
    if report.failed:
        line["error"] = str(report.longrepr)[-4000:]
    with open(file, "a") as out:
        out.write(json.dumps(line) + "\n")
