"""What a person types, or a script holds: one line after another, from the one standard input there is."""

import contextlib
import sys

from converters.errors import ConfigError
from titan_tools.launch import inside_launch

_PROMPT = "> "
_STARTS_RANKS = "titan infer … --tp N --chat, which starts the ranks itself"


class Lines:
    """Lines of standard input; blank ones are passed over.

    `edits`: on a terminal a line can be edited and called back. Not by a process that others may kill: it would leave
    the terminal without echo.
    """

    def __init__(self, *, edits: bool):
        self._is_there = sys.stdin is not None and not sys.stdin.closed
        self.is_terminal = self._is_there and sys.stdin.isatty()
        self._edits = edits and self.is_terminal and sys.stdout.isatty()
        self._num_read = self._num_messages = 0
        if self._edits:
            with contextlib.suppress(ImportError):  # Python may be built without; then only the terminal's own keys
                import readline  # noqa: F401, input() uses it where it is loaded

    def read(self) -> str | None:
        """The next line without its end; None after the last.

        Raises ConfigError for one that is not UTF-8 or holds a NUL byte, and where there is nothing to read from, or
        nothing in it.
        """
        if not self._is_there:
            raise ConfigError(
                "there is no standard input to read messages from",
                tries=["--chat --prompt TEXT", *([_STARTS_RANKS] if inside_launch() else [])],
            )
        while True:
            try:
                line = self._read_line()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"line {self._num_read} of standard input is not UTF-8: byte 0x{error.object[error.start]:02x} at "
                    f"offset {error.start}"
                ) from None
            if line and "\0" in line:
                place = len(line.partition("\0")[0].encode())
                raise ConfigError(f"line {self._num_read} of standard input holds a NUL byte at offset {place}")
            if line is None and not self._num_messages and not self.is_terminal:
                raise ConfigError("standard input holds no message", tries=["--chat --prompt TEXT"])
            if line is None or line.strip():
                self._num_messages += 1
                return line

    def _read_line(self) -> str | None:
        self._num_read += 1
        if self._edits:
            try:
                # bytes that are no UTF-8 come as lone surrogates
                return input(_PROMPT).encode("utf-8", "surrogateescape").decode("utf-8")
            except EOFError:
                print(flush=True)
                return None
            except KeyboardInterrupt:
                print(flush=True)  # what is told of it must not stand behind the prompt
                raise
        if self.is_terminal:
            print(_PROMPT, end="", file=sys.stderr, flush=True)
        raw = sys.stdin.buffer.readline()
        if not raw:
            if self.is_terminal:
                print(file=sys.stderr, flush=True)
            return None
        return raw.decode("utf-8").rstrip("\r\n")
