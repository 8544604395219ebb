"""Flow matching: from an image with noise, predict the way from the image to the noise. Torch-free at import."""

from towers.settings import Images
from trainer.api import Data, HeldOut, Objective


def num_patches(job):
    return (job.config.section(Images).size // 2) ** 2


def problems(job):
    size, cp = job.config.section(Images).size, job.dims.cp
    found = [f"images.size = {size} is odd; nearest: {size - 1} or {size + 1}"] if size % 2 else []
    if num_patches(job) % cp:
        found.append(f"parallelism.context_parallel_degree = {cp} does not divide {num_patches(job)} patches")
    return found


def open_data(job, meshes, group):
    from towers.data import HeldOutPictures, Loader

    config, batch = job.config, meshes["batch"]
    size, own = config.section(Images).size, {"rank": batch.get_local_rank(), "degree": batch.size()}
    loader = Loader(size, global_batch_size=job.samples_per_step, **own)
    if not config.validation.enable:
        return Data(loader)
    settings = config.validation
    num_batches = max(settings.steps // batch.size(), 1)  # `steps` batches over all ranks: the same images
    images = HeldOutPictures(size, local_batch_size=settings.local_batch_size, num_batches=num_batches, **own)
    return Data(loader, HeldOut([images], None, lambda losses: {"validation_loss": losses[0]}))


def place(job, meshes, device):
    """Noise and time are functions of the seed and the image's number; each context rank has a part of the patches."""
    import numpy as np
    import torch

    from trainer.api import Inputs

    power = job.config.section(Images).noise_power
    places = torch.arange(num_patches(job), device=device).chunk(job.dims.cp)[meshes["cp"].get_local_rank()]
    here = slice(int(places[0]), int(places[-1]) + 1)

    def inputs(samples):
        batch = samples.to(device)
        streams = [np.random.Generator(np.random.Philox(key=[job.seed, number])) for number in batch.numbers]
        times = batch.times or tuple(stream.random() ** power for stream in streams)
        noise = np.stack([stream.standard_normal(batch.images.shape[1:], np.float32) for stream in streams])
        noise_BPC = torch.empty_like(batch.images).copy_(torch.from_numpy(noise))
        time_B1 = torch.empty_like(batch.classes[:, :1]).copy_(torch.tensor(times, dtype=torch.float32)[:, None])
        noisy_BPC = torch.lerp(batch.images, noise_BPC, time_B1[:, :, None])
        dtype = getattr(torch, job.config.training.mixed_precision_param)
        condition = torch.cat((batch.classes, time_B1), dim=1).to(dtype)
        target = (noise_BPC - batch.images)[:, here]
        return Inputs(
            noisy_BPC[:, here].to(dtype).contiguous(), {"condition": condition, "target": target}, {"places": places}
        )

    return inputs


def install_loss(part, job, meshes):
    forward = part.forward

    def loss_sum(x, target, **others):
        result = forward(x, **others)
        return result if part.head is None else (result.float() - target).square().sum()

    part.forward = loss_sum


def prepare(part, job, meshes, device):
    """Let context ranks attend to the patches of all of them."""
    if job.dims.cp == 1:
        return
    from torch import nn

    from trainer.api import gather_shards

    class GatheredPatches(nn.Module):
        def forward(self, kv_BP2NH):
            return gather_shards(kv_BP2NH.transpose(0, 1), meshes["cp"].get_group()).transpose(0, 1)

    for unit in part.units():
        if unit.name.startswith("image_blocks."):
            unit.module.gather = GatheredPatches()


def stage_shapes(job):
    """Noisy patches [B, P, CHANNELS · PATCH], and between stages those and the condition, [B, P + 1, D]."""
    import torch

    from towers.family import CHANNELS, PATCH
    from trainer.api import StageShapes

    dtype, dim = getattr(torch, job.config.training.mixed_precision_param), job.args.dim
    shape = (job.microbatch_size, num_patches(job) // job.dims.cp, CHANNELS * PATCH)

    def hidden_like(x_BPC):
        return torch.empty(len(x_BPC), x_BPC.shape[1] + 1, dim, dtype=dtype, device=x_BPC.device)

    return StageShapes(torch.empty(shape, dtype=dtype, device="meta"), hidden_like)


def zeros(job, num_samples, is_validation):
    import torch

    from towers.data import Pictures
    from towers.family import CHANNELS, CLASSES, PATCH

    images = torch.zeros(num_samples, num_patches(job), CHANNELS * PATCH)
    times = (0.5,) * num_samples if is_validation else None
    return Pictures(images, torch.zeros(num_samples, CLASSES), tuple(range(num_samples)), times)


FLOW = Objective(
    unit="images",
    axes=("cp", "pp"),
    reads=("validation.enable", "validation.local_batch_size", "validation.steps"),
    open_data=open_data,
    place=place,
    install_loss=install_loss,
    zeros=zeros,
    problems=problems,
    prepare=prepare,
    stage_shapes=stage_shapes,
)
