"""The data of a run, as its config names it: this rank's batches to learn from, and those that are held out."""

from functools import partial
from pathlib import Path

import torch.distributed as dist

from converters.names import TEXT_INDEXES
from trainer.agree import on_each, on_first
from trainer.chosen_model import tokenizer_folder
from trainer.config.sections import Config
from trainer.data.text_index import Preparation
from trainer.data.training_data import Loader, open_training_data
from trainer.mesh import Meshes
from trainer.parallel_dims import samples_per_step
from trainer.train_model import TrainModel
from trainer.validate import Validation
from trainer.watching.metrics import note


def text_preparation(config: Config, group: dist.ProcessGroup) -> Preparation:
    """How text becomes tokens: by the model's tokenizer, once for all ranks, into the run's folder."""
    tokenizer = tokenizer_folder(config.model, config.training)
    folder = Path(config.job.dump_folder) / TEXT_INDEXES
    return Preparation(tokenizer, folder, once=partial(on_first, group), say=note)


def train_loader(
    config: Config, meshes: Meshes, preparation: Preparation, *, vocab_size: int, group: dist.ProcessGroup
) -> Loader:
    """This rank's part of the data; a step's samples at once, accumulation cuts them later."""
    batch = meshes["batch"]
    return open_training_data(
        config.training,
        preparation,
        vocab_size=vocab_size,
        on_each=partial(on_each, group),
        global_batch_size=samples_per_step(config.training, batch.size()),
        dp_rank=batch.get_local_rank(),
        dp_degree=batch.size(),
        seed=config.debug.seed or 0,
        pin_memory=config.dataloader.pin_memory,
    )


def held_out(config: Config, model: TrainModel, meshes: Meshes, preparation: Preparation) -> Validation | None:
    """What the model is held against as it learns, where the config asks for that."""
    if not config.validation.enable:
        return None
    pin_memory = config.validation_dataloader.pin_memory
    return Validation(model, config.validation, meshes, preparation, pin_memory=pin_memory)
