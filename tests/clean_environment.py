"""What tests inherit of the environment: enough to run programs, and no setting that changes what these do or print.

Imported by conftest.py before all else. A test of a variable sets it by itself. Where Python or bash must not have
started with a variable, PYTHONPATH above all, scripts/test.sh leaves it out.
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
_KEPT = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CC", "CXX"),
    *("TITAN_ENVIRONMENT", "TITAN_TORCHTITAN", "TITAN_SOAK_KILLS", "TITAN_SOAK_SEED"),  # options of the suite itself
}
_KEPT_PREFIXES = ("PYTEST_", "COVERAGE_", "CONDA_", "NVIDIA_", "TORCHINDUCTOR_", "TRITON_")  # the last two: caches


def clean(environment: dict[str, str]) -> dict[str, str]:
    """The part of an environment that tests may see, and what they rely on."""
    kept = {name: value for name, value in environment.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    if not os.access(kept.get("HOME", ""), os.W_OK):  # libraries keep caches there
        kept["HOME"] = str(Path(tempfile.gettempdir()) / f"titan-tests-home-{os.getuid()}")
        Path(kept["HOME"]).mkdir(exist_ok=True)
    # this tree before another `trainer` in what programs that tests start import
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, environment.get("PYTHONPATH"))))
    # TORCH_CPP_LOG_LEVEL: where no name server answers, c10d says of each connection that ::1 has no name
    # OMP_NUM_THREADS: the models are tiny, and threads that wait for each other take the cores of other workers
    return kept | {"LC_ALL": "C.UTF-8", "TZ": "UTC", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


_cleaned = clean(dict(os.environ))
os.environ.clear()
os.environ.update(_cleaned)


def forget_pythonwarnings() -> None:
    """Give Python's warnings the filters that it starts with; pytest has others for tests."""
    if sys.warnoptions:
        sys.warnoptions.clear()
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
