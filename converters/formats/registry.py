"""The formats that `titan convert` reads and writes. A new one is listed here, a user's own is added by `register`."""

from converters.common.errors import UnsupportedError
from converters.common.extensions import ExtensionError, check_name, check_record
from converters.formats.base import OPTIONS, Format
from converters.formats.dcp import DCP
from converters.formats.hf import HF
from converters.formats.meta import META
from converters.formats.openai import OPENAI
from converters.formats.torch import TORCH
from converters.formats.torchtune import TORCHTUNE

FORMATS: dict[str, Format] = {format.name: format for format in (DCP, HF, META, OPENAI, TORCH, TORCHTUNE)}


def register(format: Format) -> None:
    """Add a format under its name. Raises ExtensionError for fields of other types and unknown options."""
    check_record(format, Format, f"format {getattr(format, 'name', '')!r}")
    check_name("format", format.name, FORMATS, pattern="[a-z][a-z0-9_]*")  # `NAME-to-dcp` is a command
    if unknown := [name for name in format.takes if name not in OPTIONS]:
        raise ExtensionError(f"format {format.name!r}: takes has {', '.join(unknown)}; there are {', '.join(OPTIONS)}")
    FORMATS[format.name] = format


def get_format(name: str) -> Format:
    """The format of that name. Raises UnsupportedError, naming those that exist."""
    if name not in FORMATS:
        raise UnsupportedError(f"unknown format: {name!r}", hint=f"known: {', '.join(FORMATS)}")
    return FORMATS[name]


def usual_format(container: str) -> Format | None:
    """The format that a checkpoint in this container is taken for; None if no format has it first."""
    return next((format for format in FORMATS.values() if format.containers[0] == container), None)
