"""Read a pickle without executing code: opcodes are checked first, and every global resolves to a stub of ours.

A pickle is a program. `_check_opcodes` allows only the opcodes that torch and DCP emit (and no memo index that would
make the unpickler allocate gigabytes), and the unpickler looks up every global in a table of the caller. A name that is
not in the table is refused; nothing is imported.
"""

import gc
import io
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from converters.common.errors import CheckpointError, TitanError, UnsupportedError, in_words

Stubs = Mapping[tuple[str, str], Any]  # (module, name) → stub

# Opcodes without an argument: marks, containers, constants, REDUCE, BUILD, NEWOBJ, MEMOIZE, STACK_GLOBAL, BINPERSID.
# Left out, because no writer of checkpoints emits them: INST, OBJ, EXT*, PERSID, DUP, POP, text forms, buffers.
_PLAIN = rb"[()\]}NRabedlstuQ\x81\x85-\x89\x8f-\x91\x93\x94]"
_SHORT_STRINGS = b"|".join(b"\x8c" + re.escape(bytes([n])) + b".{%d}" % n for n in range(1, 64))
# One possessive match of everything of fixed size: 200,000 chunks are millions of opcodes, too many for a Python loop.
_RUN = re.compile(
    rb"(?s)(?:" + _PLAIN + rb"++|[Khq\x80].|M..|[Jj].{4}|[G\x95].{8}|" + _SHORT_STRINGS + rb")*+",
)
_LENGTH_BYTES = {0x8C: 1, 0x43: 1, 0x8A: 1, 0x58: 4, 0x42: 4, 0x8D: 8, 0x8E: 8}  # strings, bytes and LONG1, by opcode
_GLOBAL, _LONG_BINPUT, _STOP = 0x63, 0x72, 0x2E


class Sealed(type):
    """Metaclass of every stub: a BUILD opcode cannot set attributes on the class itself."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"a pickle may not change {cls.__name__}")


@dataclass(frozen=True, slots=True)
class RefusedClass:
    """Marks a harmless, well-known class that is not supported. `what` describes it."""

    what: str
    hint: str = "convert it to a plain tensor (.dequantize(), .to_dense()) and save again"


class PlainDict(dict[Any, Any], metaclass=Sealed):
    """Stub of OrderedDict; attributes that modules add to a state dict (`_metadata`) are left out."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class PlainBytes(metaclass=Sealed):
    """Stub of `_codecs.encode`, which protocol 2 uses for bytes."""

    def __new__(cls, text: str, encoding: str) -> bytes:  # type: ignore[misc]
        if encoding != "latin1":
            raise ValueError(f"bytes in encoding {encoding!r}")
        return text.encode("latin-1")


PLAIN_STUBS: Stubs = {
    ("collections", "OrderedDict"): PlainDict,
    ("_codecs", "encode"): PlainBytes,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
}


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, stubs: Stubs, persistent: Callable[[Any], Any] | None, what: str):
        super().__init__(io.BytesIO(data))
        self._stubs = stubs
        self._persistent = persistent
        self._what = what

    def find_class(self, module: str, name: str) -> Any:
        stub = self._stubs.get((module, name))
        if stub is None:
            raise CheckpointError(
                f"{self._what}: refused, it asks for `{module}.{name}`"[:500],
                hint="a pickle that names anything but tensors and plain values could run code; nothing was executed "
                "(instead of a whole model or optimizer, save the state_dict())",
            )
        if isinstance(stub, RefusedClass):
            raise UnsupportedError(
                f"{self._what}: holds {stub.what}, which is not covered",
                hint=stub.hint,
            )
        return stub

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise CheckpointError(f"{self._what}: refused, it refers to a storage, and only plain values are allowed")
        return self._persistent(pid)


def safe_load(
    data: bytes,
    stubs: Stubs,
    *,
    what: str,
    max_bytes: int = 64 << 20,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of a pickle in which every global is one of `stubs`. Raises CheckpointError for anything else.

    `what` names the file and record in messages. Every opcode takes at least a byte, so `max_bytes` caps them too.
    """
    if len(data) > max_bytes:
        raise CheckpointError(f"{what}: a pickle of {len(data):,} bytes, more than the plausible {max_bytes:,}")
    _check_opcodes(data, what)
    collecting = gc.isenabled()
    gc.disable()  # there are no cycles, and the collector would take two thirds of the time of a large `.metadata`
    try:
        return _Reader(data, stubs, persistent, what).load()
    except UnsupportedError as error:
        raise error if error.message.startswith(what) else UnsupportedError(f"{what}: {error.message}") from None
    except TitanError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: damaged, or not a checkpoint's pickle ({in_words(error)})") from error
    finally:
        if collecting:
            gc.enable()


def _check_opcodes(data: bytes, what: str) -> None:
    position, size = 0, len(data)
    while True:
        run = _RUN.match(data, min(position, size))
        assert run is not None  # it also matches an empty run
        position = run.end()
        if position >= size:
            raise CheckpointError(f"{what}: the pickle is truncated", hint="the file is truncated or damaged")
        opcode = data[position]
        if opcode == _STOP:
            break
        position += 1
        if opcode in _LENGTH_BYTES:
            width = _LENGTH_BYTES[opcode]
            position += width + int.from_bytes(data[position : position + width], "little")
        elif opcode == _GLOBAL:
            position = data.find(b"\n", data.find(b"\n", position) + 1) + 1 or size
        elif opcode == _LONG_BINPUT and int.from_bytes(data[position : position + 4], "little") < size:
            position += 4  # an index larger than the number of bytes can only blow up the memo
        else:
            raise CheckpointError(
                f"{what}: refused, pickle opcode 0x{opcode:02x} at byte {position - 1} does not occur in checkpoints",
                hint="the file is damaged, hostile, or written by an unknown tool",
            )
    if position + 1 != size:
        raise CheckpointError(f"{what}: {size - position - 1} bytes after the end of the pickle")
