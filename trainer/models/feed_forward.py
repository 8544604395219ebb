"""A dense feed-forward in plain PyTorch. Shape letters: B batch, L tokens, D model dim."""

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from converters.families.blocks import Dense

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """SwiGLU or GeGLU."""

    def __init__(self, dim: int, dense: Dense):
        super().__init__()
        self.activation = _ACTIVATIONS[dense.activation]
        self.w1 = nn.Linear(dim, dense.hidden, bias=dense.has_biases)
        self.w2 = nn.Linear(dense.hidden, dim, bias=dense.has_biases)
        self.w3 = nn.Linear(dim, dense.hidden, bias=dense.has_biases)

    def forward(self, x_BLD: Tensor) -> Tensor:
        out_BLD: Tensor = self.w2(self.activation(self.w1(x_BLD)) * self.w3(x_BLD))
        return out_BLD
