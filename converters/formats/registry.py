"""Which formats a conversion can write."""

from collections.abc import Mapping

from converters.errors import UnsupportedError
from converters.formats.base import Output
from converters.formats.dcp import DCP
from converters.formats.hf import HF
from converters.formats.meta import META
from converters.formats.torch import TORCH
from converters.formats.torchtune import TORCHTUNE

OUTPUTS: Mapping[str, Output] = {output.name: output for output in (DCP, HF, META, TORCH, TORCHTUNE)}


def get_output(name: str) -> Output:
    """The format of that name. Raises UnsupportedError, naming those that exist."""
    if name not in OUTPUTS:
        raise UnsupportedError(f"there is no format {name!r} to write", hint=f"known: {', '.join(OUTPUTS)}")
    return OUTPUTS[name]
