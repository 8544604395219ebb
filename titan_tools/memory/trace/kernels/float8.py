"""Float8 as a GPU runs it, where a CPU stands in for the GPU.

torchao's operations are the same on any device: scales, casts, transposed copies and `torch._scaled_mm` all come by as
operations on fake tensors, and are written down like others. Only which tensor-parallel styles are taken depends on it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import trainer.build


@contextmanager
def float8_as_on_gpu() -> Iterator[None]:
    """Within, a model that is built gathers in float8 over tensor-parallel ranks, as NCCL does and gloo cannot."""
    own = trainer.build.float8_styles
    with patch.object(trainer.build, "float8_styles", _on_gpu(own)):
        yield


def _on_gpu(own: Callable) -> Callable:
    def float8_styles(*args, device_type: str, **kwargs):
        return own(*args, device_type="cuda", **kwargs)

    return float8_styles
