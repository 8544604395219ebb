"""Row-sharded embedding for tensor parallelism: each rank looks up the tokens of its rows.

torch's RowwiseParallel gives the same numbers, but DTensor (2.11 to 2.13) has no row-sharding rule for an embedding's
backward: each rank computes the gradient of the whole vocabulary and selects its rows later, in a pipeline after the
last microbatch, in fp32 until then (405B on 8 ranks: 8.4 GB instead of 1.05). torchtitan (#3468) does the same as here.
The collectives are the same: reduce-scatter in forward, all-gather in backward.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from converters.common.errors import UnsupportedError
from trainer.ranks.mesh import local_part


class RowsOfVocabulary(ParallelStyle):
    """Style of an `nn.Embedding`: equal row shards, input tokens [B, L], output sequence shards [B, L / tp, D]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        _refuse_other_embeddings(module)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        module.forward = partial(_look_up, module, device_mesh)  # type: ignore[method-assign]
        return module


def _refuse_other_embeddings(module: nn.Embedding) -> None:
    """Raise UnsupportedError for an embedding that does more than a lookup, since `_look_up` replaces its forward."""
    options = {name: getattr(module, name) for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")}
    more = [f"{name} = {value}" for name, value in options.items() if value is not None and value is not False]
    if type(module).forward is not nn.Embedding.forward:
        more.append(f"{type(module).__name__} overrides forward")
    if more:
        raise UnsupportedError(
            f"tensor parallelism supports an nn.Embedding that only looks up rows, not this one ({'; '.join(more)});"
            " nearest: do the rest in the model's forward, or parallelism.tensor_parallel_degree = 1"
        )


def _look_up(module: nn.Embedding, mesh: DeviceMesh, tokens_BL: Tensor) -> Tensor:
    rows_VD = local_part(module.weight)  # at each call: FSDP replaces the parameter while it is gathered
    num_rows = rows_VD.shape[0]
    # Tokens of other ranks are looked up in arbitrary rows and masked to zero in the sum.
    is_elsewhere_BL = tokens_BL // num_rows != mesh.get_local_rank()
    x_BLD = F.embedding(tokens_BL % num_rows, rows_VD).masked_fill_(is_elsewhere_BL.unsqueeze(-1), 0)
    return DTensor.from_local(x_BLD, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)]).to_local()
