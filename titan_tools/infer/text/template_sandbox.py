"""Run chat templates, which are untrusted code, in a sandbox with limits of time and memory.

Variables, filters and white space are those of transformers' apply_chat_template, for which templates are written.
"""

import json
import resource
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from converters.common.errors import CheckpointError
from converters.common.sizes import GIB

MOST_SECS = 10  # a real template takes milliseconds
_REPEAT_SECS = 1  # raise again, because Python ignores exceptions in __del__ and during garbage collection
MOST_BYTES = GIB  # in addition to what the process holds before
MOST_CHARACTERS = 1 << 26  # no context is as long, and tokenizing more would take minutes
_STATM = Path("/proc/self/statm")


class TemplateRejection(Exception):
    """The template itself rejected the messages, by `raise_exception`."""


class _TimeLimit(BaseException):
    """Not an Exception, since Jinja catches those while it evaluates constants."""


def render_template(source: str, names: Mapping[str, Any], *, where: str) -> str:
    """The rendered text. Raises TemplateRejection, and CheckpointError for any other failure.

    `where`: the template's path, for messages. Time is limited in the main thread only, memory on Linux only.
    """
    try:
        with _limited_memory(), _limited_time():
            text = _compiled(source).render(**names)
    except TemplateRejection:
        raise
    except (Exception, _TimeLimit) as error:  # templates can raise any exception
        line = _line(error)
        place = f"{where}, line {line}" if line else where
        raise CheckpointError(
            f"the chat template in {place} {_describe(error)}",
            hint="it is part of the checkpoint; --prompt without --chat needs no template",
        ) from None
    if len(text) > MOST_CHARACTERS:
        raise CheckpointError(f"the chat template in {where} makes {len(text):,} characters of these messages")
    return text


@lru_cache(maxsize=4)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, dict=_Dict(), namespace=_Namespace)
    return environment.from_string(source)


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks the model's messages for a training loss; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, without escapes for < and >."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateRejection(str(message))


class _Dict:
    """The uses of `dict` in templates, without access to the class."""

    def __call__(self, *args: Any, **more: Any) -> dict[Any, Any]:
        return dict(*args, **more)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **attributes: Any) -> None:  # `self` may be the name of an attribute
        self, *rest = args
        attributes = dict(*rest, **attributes)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"names in a namespace must not begin with an underscore: {name!r}")


def _describe(error: BaseException) -> str:
    match error:
        case TemplateSyntaxError():
            return f"is not a valid Jinja template: {error.message}"
        case SecurityError():
            return f"does something forbidden: {error}"
        case _TimeLimit():
            return f"takes too long: stopped after {MOST_SECS} s"
        case MemoryError():
            return f"takes more than {MOST_BYTES >> 30} GiB of memory"
        case RecursionError():
            return "has an endless recursion"
        case TemplateError():
            return f"fails on these messages: {error.message}"
    return f"fails on these messages: {type(error).__name__}: {error}"


def _line(error: BaseException) -> int | None:
    """The line in the template, from Jinja's traceback."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return lines[-1] if lines else None


@contextmanager
def _limited_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signal handlers run there only
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise _TimeLimit

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECS, _REPEAT_SECS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _limited_memory() -> Iterator[None]:
    """By the kernel's limit: `{{ 'a' * 10 ** 11 }}` is a single step of Python."""
    if not _STATM.exists():
        yield
        return
    now = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (now + MOST_BYTES, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
