"""Pickles that would run code, in several spellings, and a canary that tells whether one did."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path


def pickles(canary: Path) -> dict[str, bytes]:
    """By name: pickles that write `canary` when they are run."""
    command = f"touch {canary}".encode()
    python = f"open({str(canary)!r}, 'w')".encode()

    class Reduce:
        def __reduce__(self):
            return exec, (python.decode(),)

    return {
        "reduce": pickle.dumps(Reduce(), protocol=2),
        "reduce_protocol_4": pickle.dumps({"weight": Reduce()}, protocol=4),
        "global": b"\x80\x02cposix\nsystem\nU" + bytes([len(command)]) + command + b"\x85R.",
        "inst": b"(S'" + command + b"'\nios\nsystem\n.",
        "obj": b"(cposix\nsystem\nS'" + command + b"'\no.",
        "ext": b"\x80\x02\x82\x01.",
        "nested": b"\x80\x03cpickle\nloads\n" + pickle.dumps(pickle.dumps(Reduce()), protocol=3)[2:-1] + b"\x85R.",
        "stacked": b"\x80\x02N." + pickle.dumps(Reduce(), protocol=2),
        "getattr": b"\x80\x02cbuiltins\ngetattr\n(cbuiltins\n__import__\nX\x02\x00\x00\x00osttR.",
        "torch_function": b"\x80\x02ctorch.hub\nload\n)R.",
        "build_on_class": b"\x80\x02ccollections\nOrderedDict\nN}X\x0c\x00\x00\x00__setstate__K\x01s\x86b.",
        "memo_bomb": b"\x80\x02Nr" + struct.pack("<I", 0x7FFFFFFF) + b".",
    }


def torch_zip(data_pkl: bytes) -> bytes:
    """A torch.save archive around a `data.pkl`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


def opened_by(action: Callable[[], object]) -> list[str]:
    """The audited events of running code or importing (`exec`, `os.system`, `import` …) while `action` runs."""
    import sys

    seen: list[str] = []
    active = [True]
    watched = ("exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")

    def hook(event: str, arguments: tuple) -> None:
        if active[0] and event in watched:
            seen.append(event)

    sys.addaudithook(hook)  # cannot be removed again, only put to sleep
    try:
        action()
    finally:
        active[0] = False
    return seen
