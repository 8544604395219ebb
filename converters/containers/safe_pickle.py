"""Read a pickle without running anything: opcodes are checked first, and every global resolves to a stand-in of ours.

A pickle is a program. Two gates stand before it: `_check_opcodes` lets only the opcodes pass that torch and DCP emit
(and no memo index that would make the unpickler allocate gigabytes), and the unpickler looks every global up in a table
that the caller gives. A name outside the table is refused; nothing is ever imported.
"""

import gc
import io
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from converters.errors import CheckpointError, TitanError, UnsupportedError, in_words

Stubs = Mapping[tuple[str, str], Any]  # (module, name) → the stand-in

# Opcodes without an argument: marks, containers, constants, REDUCE, BUILD, NEWOBJ, MEMOIZE, STACK_GLOBAL, BINPERSID.
# Left out, because no writer of checkpoints emits them: INST, OBJ, EXT*, PERSID, DUP, POP, text forms, buffers.
_PLAIN = rb"[()\]}NRabedlstuQ\x81\x85-\x89\x8f-\x91\x93\x94]"
_SHORT_STRINGS = b"|".join(b"\x8c" + re.escape(bytes([n])) + b".{%d}" % n for n in range(1, 64))
# One possessive run over everything of fixed size: 200,000 chunks are millions of opcodes, too many for a Python loop.
_RUN = re.compile(
    rb"(?s)(?:" + _PLAIN + rb"++|[Khq\x80].|M..|[Jj].{4}|[G\x95].{8}|" + _SHORT_STRINGS + rb")*+",
)
_LENGTH_BYTES = {0x8C: 1, 0x43: 1, 0x8A: 1, 0x58: 4, 0x42: 4, 0x8D: 8, 0x8E: 8}  # strings, bytes and LONG1, by opcode
_GLOBAL, _LONG_BINPUT, _STOP = 0x63, 0x72, 0x2E


class Sealed(type):
    """Metaclass of every stand-in: a BUILD opcode cannot set attributes on the class itself."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"a pickle may not change {cls.__name__}")


@dataclass(frozen=True, slots=True)
class Refused:
    """In place of a stand-in: harmless, well known, and not covered. `what` says what it would have been."""

    what: str


class PlainDict(dict, metaclass=Sealed):
    """Stands in for OrderedDict; attributes that modules hang on a state dict (`_metadata`) are left out."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class PlainBytes(metaclass=Sealed):
    """Stands in for `_codecs.encode`, which is how protocol 2 spells bytes."""

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
                hint="a pickle that names anything but tensors and plain values could run code; nothing of it was run "
                "(of a whole model or optimizer, save the state_dict())",
            )
        if isinstance(stub, Refused):
            raise UnsupportedError(
                f"{self._what}: holds {stub.what}, which is not covered",
                hint="make plain tensors of it (.dequantize(), .to_dense(), .full_tensor()) and save them again",
            )
        return stub

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise CheckpointError(f"{self._what}: refused, it refers to a storage where only plain values may stand")
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
        raise CheckpointError(
            f"{what}: a pickle of {len(data):,} bytes, more than the {max_bytes:,} that are plausible"
        )
    _check_opcodes(data, what)
    collecting = gc.isenabled()
    gc.disable()  # nothing here makes cycles, and the collector takes two thirds of the time of a big `.metadata`
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
        position = _RUN.match(data, min(position, size)).end()
        if position >= size:
            raise CheckpointError(f"{what}: the pickle is cut off", hint="the file is truncated or damaged")
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
            position += 4  # a larger index than there are bytes only serves to blow up the memo
        else:
            raise CheckpointError(
                f"{what}: refused, pickle opcode 0x{opcode:02x} at byte {position - 1} has no place in a checkpoint",
                hint="the file is damaged, hostile, or written by a tool whose format is not known here",
            )
    if position + 1 != size:
        raise CheckpointError(f"{what}: {size - position - 1} bytes after the end of the pickle")
