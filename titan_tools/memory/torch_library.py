"""torch's largest library, mapped into memory by a thread while Python loads sympy, which torch needs as well.

Each takes a sixth of a second: one has no Python to run, the other has nothing else. torch is loaded the same without
it, which is why nothing is said where it fails: another name of the library, or one that needs others first.
"""

import ctypes
import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def map_torch_library() -> None:
    """Before the first `import torch`, which waits for the thread where that is not done yet."""
    spec = find_spec("torch") if sys.platform == "linux" and "torch" not in sys.modules else None
    if spec is None or spec.origin is None:
        return
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    threading.Thread(target=_map, args=(library,), daemon=True).start()
    import_module("sympy")


def _map(library: Path) -> None:
    """As Python's import does it, but called as a foreign function: that lets other threads run meanwhile."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dlopen(bytes(library), sys.getdlopenflags())
