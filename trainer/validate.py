"""Validation: the mean loss on held-out data, over the same batches every time, for each source separately."""

from collections.abc import Iterable, Mapping
from itertools import islice

import torch
import torch.distributed as dist

from converters.common.extensions import ExtensionError, where_defined
from trainer.batch import Batch
from trainer.objective import HeldOut
from trainer.train_model import TrainModel


class Validator:
    """Computes the held-out loss; `run` starts from the beginning each time and does not change the model."""

    def __init__(self, model: TrainModel, held_out: HeldOut | None):
        """Raises ExtensionError if the objective has opened no held-out data."""
        if held_out is None:
            raise ExtensionError("validation.enable is read by the objective, whose `open_data` returned no `held_out`")
        self._model, self._held_out = model, held_out

    def run(self) -> Mapping[str, float | None]:
        """The objective's metrics of the loss per unit of each source; equal on all ranks."""
        model, dims = self._model, self._model.meshes.dims
        for part in model.parts:
            part.eval()
        sums = torch.stack([self._sums(loader) for loader in self._held_out.loaders])  # loss, units
        for part in model.parts:
            part.train()
        device = next(iter(model.named_parameters().values())).device
        sums = sums.to(device)
        dist.all_reduce(sums)
        # tp ranks hold the same share of the loss; all ranks outside a batch group count the same units
        copies = dims.world_size // dims.batch
        metrics = self._held_out.metrics([(loss / dims.tp) / (units / copies) for loss, units in sums.tolist()])
        if "validation_loss" not in metrics:
            where = where_defined(self._held_out.metrics)
            raise ExtensionError(f"{where}: the metrics of held-out data have no validation_loss: {dict(metrics)}")
        return metrics

    def _sums(self, loader: Iterable[Batch]) -> torch.Tensor:
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in islice(loader, self._held_out.num_batches):
            sums += torch.tensor([self._model.forward_loss(batch).item(), batch.num_units], dtype=torch.float64)
        return sums
