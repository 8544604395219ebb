"""The formats that `titan convert` reads and writes. A new one is listed here, a user's own is added by `register`."""

from converters.common.errors import UnsupportedError
from converters.formats.base import Format
from converters.formats.dcp import DCP
from converters.formats.hf import HF
from converters.formats.meta import META
from converters.formats.openai import OPENAI
from converters.formats.torch import TORCH
from converters.formats.torchtune import TORCHTUNE

FORMATS: dict[str, Format] = {format.name: format for format in (DCP, HF, META, OPENAI, TORCH, TORCHTUNE)}


def register(format: Format) -> None:
    """Add a format under its name, for `converters.convert.convert`; the commands are made from the built-in ones."""
    FORMATS[format.name] = format


def get_format(name: str) -> Format:
    """The format of that name. Raises UnsupportedError, naming those that exist."""
    if name not in FORMATS:
        raise UnsupportedError(f"unknown format: {name!r}", hint=f"known: {', '.join(FORMATS)}")
    return FORMATS[name]


def usual_format(container: str) -> Format:
    """The format that a checkpoint in this container is taken for."""
    return next(format for format in FORMATS.values() if format.containers[0] == container)
