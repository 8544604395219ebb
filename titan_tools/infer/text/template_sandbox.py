"""Run a chat template, which is code from wherever the checkpoint came from: in a sandbox, and not for ever.

Names, filters and white space are those of transformers' apply_chat_template, for which templates are written.
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

from converters.errors import CheckpointError

MOST_SECS = 10  # a real template takes milliseconds
_AGAIN_AFTER_SECS = 1  # what is raised in a __del__ or while Python collects garbage is ignored: then it is said again
MOST_BYTES = 1 << 30  # more than the process held before
MOST_CHARACTERS = 1 << 26  # no model reads as many; to find that out by counting their tokens would take minutes
_STATM = Path("/proc/self/statm")


class Refusal(Exception):
    """The template itself said that it does not take these messages."""


class _TooLong(BaseException):
    """Of another kind than what Jinja catches while it computes constants."""


def render_template(source: str, names: Mapping[str, Any], *, where: str) -> str:
    """What the template writes. Raises Refusal where it says so itself, and CheckpointError for any other failure.

    `where` names the template's place. Time is bounded in a program's main thread, memory on Linux.
    """
    try:
        with _bounded():
            text = _compiled(source).render(**names)
    except Refusal:
        raise
    except (Exception, _TooLong) as error:  # a template can raise whatever Python can
        line = _line(error)
        place = f"{where}, line {line}" if line else where
        raise CheckpointError(
            f"the chat template in {place} {_what_went_wrong(error)}",
            hint="it is code that came with the checkpoint; --prompt without --chat needs none",
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
    """{% generation %} … {% endgeneration %} tells a training loss what the model said; here it is only a block."""

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
    """Jinja's own would write < and > as escapes, for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise Refusal(str(message))


class _Dict:
    """What templates do with `dict`, without the class itself."""

    def __call__(self, *args: Any, **more: Any) -> dict[Any, Any]:
        return dict(*args, **more)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, as transformers has it."""

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
        raise SecurityError(f"a namespace holds no names that begin with an underscore, such as {name!r}")


def _what_went_wrong(error: BaseException) -> str:
    match error:
        case TemplateSyntaxError():
            return f"is no Jinja template: {error.message}"
        case SecurityError():
            return f"does what no template may: {error}"
        case _TooLong():
            return f"does not come to an end: stopped after {MOST_SECS} s"
        case MemoryError():
            return f"takes more than {MOST_BYTES >> 30} GiB of memory"
        case RecursionError():
            return "calls itself without an end"
        case TemplateError():
            return f"fails on these messages: {error.message}"
    return f"fails on these messages: {type(error).__name__}: {error}"


def _line(error: BaseException) -> int | None:
    """Where in the template; Jinja writes its lines into the traceback."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return lines[-1] if lines else None


@contextmanager
def _bounded() -> Iterator[None]:
    with _bounded_memory(), _bounded_time():
        yield


@contextmanager
def _bounded_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # the only one that hears signals
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECS, _AGAIN_AFTER_SECS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """`{{ 'a' * 10 ** 11 }}` is one step of Python: nothing but the kernel can say no."""
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
