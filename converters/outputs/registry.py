"""Which formats a conversion can write."""

from collections.abc import Mapping

from converters.errors import UnsupportedError
from converters.outputs.base import Output
from converters.outputs.dcp import DCP
from converters.outputs.hf import HF
from converters.outputs.meta import META
from converters.outputs.torch import TORCH
from converters.outputs.torchtune import TORCHTUNE

OUTPUTS: Mapping[str, Output] = {output.name: output for output in (DCP, HF, META, TORCH, TORCHTUNE)}


def get_output(name: str) -> Output:
    """The format of that name. Raises UnsupportedError, naming those that exist."""
    if name not in OUTPUTS:
        raise UnsupportedError(f"there is no format {name!r} to write", hint=f"known: {', '.join(OUTPUTS)}")
    return OUTPUTS[name]
