"""The model as a rank trains it: its parts, their parameters by FQN, and forward and backward."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from converters.common.box import Box
from converters.common.threads import deferred_signals, in_parallel
from converters.families.args import ModelArgs
from converters.families.registry import get_family
from converters.layout.layout import local_box
from converters.model.model_info import ModelInfo
from trainer.batch import Batch, Inputs
from trainer.models.initial_weights import InitialWeights
from trainer.models.units import ModelPart
from trainer.parallel.float8 import without_float8
from trainer.parallel.tied import TiedCopies, native_name
from trainer.ranks.mesh import Meshes, local_part
from trainer.runner import Runner
from trainer.runtime import cores_per_rank


class TrainModel:
    """The parts of the model that a rank holds, and the two things the loop does with them."""

    def __init__(
        self,
        *,
        family: str,
        args: ModelArgs,
        meshes: Meshes,
        parts: list[ModelPart],
        runner: Runner,
        place: Callable[[Batch], Inputs],
        first_and_last_on_one_rank: bool,
        accumulating: Callable[[], AbstractContextManager[Any]] = nullcontext,
        after_update: Callable[[], None] | None = None,
    ):
        self.family, self.args, self.meshes, self.parts = family, args, meshes, parts
        self._runner, self._place = runner, place
        self._after_update = after_update
        self.accumulating = accumulating  # around all batches of a step but the last: gradients need not be reduced yet
        # Collected once: while FSDP has gathered a parameter, its module shows the gathered one.
        self._tied = TiedCopies(args, parts, meshes, first_and_last_on_one_rank=first_and_last_on_one_rank)
        followers = set(map(id, self._tied.followers))
        named = [(name, p) for part in parts for name, p in part.named_parameters() if id(p) not in followers]
        self._parameters = {native_name(name, args): p for name, p in named}
        untrained = {p.fqn for p in get_family(family).parameters(args) if not p.is_trained}
        self._buffers = {name: b for part in parts for name, b in part.named_buffers() if name in untrained}

    def forward_backward(self, batch: Batch, num_units: Tensor | float) -> Tensor:
        """Add this batch's gradients. Returns this rank's share of the loss: its sum / num_units.

        `num_units` counts those of the whole optimizer step, over all ranks and accumulated batches; a 0-dim tensor on
        the device, so that the host need not wait for it.
        Shares add up over `batch`, `cp` and `pp` (0 but on the last stage); tp ranks hold the same share.
        """
        self._tied.refresh()
        return self._runner.forward_backward(self._place(batch), num_units)

    def forward_loss(self, batch: Batch) -> Tensor:
        """This rank's share of the summed loss, not divided; no gradients."""
        self._tied.refresh()
        loss = self._runner.forward_loss(self._place(batch))
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # no backward follows that would free what "never" keeps gathered
        return loss

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Run what the build requires after every update."""
        if after_update := self._after_update:
            optimizer.register_step_post_hook(lambda *_: after_update())

    def sum_tied_gradients(self) -> None:
        """Give both copies of an embedding that is tied across stages the whole gradient; once, before clipping."""
        self._tied.sum_gradients()

    def tied_copies(self) -> list[nn.Parameter]:
        """Parameters here that an earlier stage holds too: a norm over all ranks must leave them out."""
        return self._tied.copies

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """FQN → parameter. A tied output on another stage has the embedding's FQN, as on disk."""
        return self._parameters

    def named_buffers(self) -> Mapping[str, Tensor]:
        """FQN → what is saved besides the parameters and not trained: whole on each rank of its stage, float32."""
        return self._buffers

    def state_dict(self) -> dict[str, Tensor]:
        """FQN → live tensor (a DTensor if it is sharded), parameters and buffers: loading fills it in place."""
        trained = {fqn: without_float8(parameter.detach()) for fqn, parameter in self._parameters.items()}
        return trained | self._buffers

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set the initial weights: equal in any layout for a seed, and equal to those that `titan seed` writes.

        They are drawn by as many threads as this rank has cores.
        """
        weights = InitialWeights(ModelInfo(self.family, self.args), seed=seed)
        native = {p.fqn: p for p in get_family(self.family).parameters(self.args)}

        def blocks() -> Iterator[tuple[Tensor, Callable[[], np.ndarray]]]:
            for fqn, parameter in self._parameters.items():
                box = local_box(native[fqn], self.meshes.dims, dist.get_rank())
                local = local_part(without_float8(parameter))
                assert tuple(local.shape) == (box.sizes if box else (0, *local.shape[1:])), (fqn, local.shape, box)
                if box is not None:
                    for part, draw in weights.blocks(fqn, box):
                        yield local[part.slices_within(box)], draw
            for fqn, buffer in self._buffers.items():
                whole = Box.whole(buffer.shape)
                for part, draw in weights.blocks(fqn, whole):
                    yield buffer[part.slices_within(whole)], draw

        def draw(block: tuple[Tensor, Callable[[], np.ndarray]]) -> tuple[Tensor, np.ndarray]:
            return block[0], block[1]()

        drawn = in_parallel(draw, blocks(), cores_per_rank())
        with deferred_signals() as deliver_signals, closing(drawn):
            for local, values in drawn:
                deliver_signals()
                local.copy_(torch.from_numpy(values))
