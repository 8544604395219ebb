"""An embedding whose rows lie on the tensor-parallel ranks: each looks up the tokens that it has rows for.

torch's RowwiseParallel gives the same numbers, but DTensor (2.11 to 2.13) has no rule by which an embedding's backward
leaves rows: each rank makes the gradient of the whole vocabulary and cuts its rows out later, in a pipeline only after
the last microbatch, whole and in fp32 until then (405B on 8 ranks: 8.4 GB instead of 1.05). torchtitan's embedding
(#3468) goes this way too. Messages are the same: sums are scattered in forward, gradients gathered in backward.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from converters.errors import UnsupportedError


class RowsOfVocabulary(ParallelStyle):
    """The style of an `nn.Embedding`: equal shares of rows, tokens [B, L] in, sequence shards [B, L / tp, D] out."""

    def _apply(self, module: nn.Embedding, device_mesh: DeviceMesh) -> nn.Module:
        _refuse_what_is_not_plain(module)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        module.forward = partial(_look_up, module, device_mesh)
        return module


def _refuse_what_is_not_plain(module: nn.Embedding) -> None:
    """Raise UnsupportedError for one that does more than look up: `_look_up` takes the place of its forward."""
    options = {name: getattr(module, name) for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")}
    more = [f"{name} = {value}" for name, value in options.items() if value is not None and value is not False]
    if type(module).forward is not nn.Embedding.forward:
        more.append(f"{type(module).__name__} has a forward of its own")
    if more:
        raise UnsupportedError(
            f"tensor parallelism takes an nn.Embedding that only looks up rows, not this one ({'; '.join(more)});"
            " nearest: do the rest in the model's forward, or parallelism.tensor_parallel_degree = 1"
        )


def _look_up(module: nn.Embedding, mesh: DeviceMesh, tokens_BL: Tensor) -> Tensor:
    rows_VD = module.weight.to_local()  # at each call: FSDP shows another parameter while it has gathered
    num_rows = rows_VD.shape[0]
    # Tokens of other ranks are looked up too, whichever row that gives, and count as zero in the sum.
    is_elsewhere_BL = tokens_BL // num_rows != mesh.get_local_rank()
    x_BLD = F.embedding(tokens_BL % num_rows, rows_VD).masked_fill_(is_elsewhere_BL.unsqueeze(-1), 0)
    return DTensor.from_local(x_BLD, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)]).to_local()
