"""Gradient clipping by the global norm over all meshes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


class GradientClip:
    """Clips all gradients by their global norm, with one all-reduce over all ranks of any layout."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        max_norm: float,
        ranks_per_stage: int,
        copies: Iterable[nn.Parameter] = (),
    ):
        """`copies` are parameters that another stage also holds (tied embeddings) and counts."""
        self._parameters = list(parameters)
        self._max_norm = max_norm
        copied = set(map(id, copies))
        shares = [0.0 if id(p) in copied else _num_shards(p) / ranks_per_stage for p in self._parameters]
        # On the gradients' device: a copy from the host would synchronize
        self.shares = torch.tensor(shares, dtype=torch.float64, device=self._parameters[0].device)
        self.square_sums = square_sums_on_gpu if self.shares.is_cuda else square_sums_on_cpu

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """Clip and return the norm before clipping: float64, 0-dim, equal on all ranks."""
        gradients = [local_gradient(p) for p in self._parameters]
        squares = self.square_sums(gradients)
        # Replicated gradients are summed several times, each with its share; empty shards add nothing.
        total = (self.shares * squares).sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        norm = total.sqrt()
        scale = torch.clamp(self._max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, scale.to(torch.float32))
        return norm


def square_sums_on_cpu(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of each tensor, float64, row by row.

    Torch sums a whole tensor sequentially in fp32: 4e-4 too little at 10 M elements, and less in shards, so that
    layouts would differ. Row by row it is precise enough, and as fast.
    """
    rows = [torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32) for tensor in tensors]
    return torch.stack([norms.double().square().sum() for norms in rows])


def square_sums_on_gpu(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of each tensor, float64, in few kernel launches."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).double().square()


def _num_shards(parameter: nn.Parameter) -> int:
    """Number of different shards among the ranks of a stage."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return max(1, torch.Size(mesh.size(i) for i, p in enumerate(parameter.placements) if not p.is_replicate()).numel())


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient, with its parameter's placements."""
    gradient = parameter.grad
    assert gradient is not None, "every parameter takes part in every step"
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:  # sequence parallelism leaves a norm's gradient unreduced
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    return gradient.to_local()
