"""A few training steps in any layout, for parity tests: the build and the step of the trainer, on data made here."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from converters.catalog import Box
from converters.families.base import ModelArgs
from converters.families.registry import get_family
from converters.model_info import ModelInfo
from trainer.build import build
from trainer.train_model import TrainModel
from trainer.config.sections import ActivationCheckpoint, Config, Model, Optimizer, Parallelism, Training
from trainer.data.batch import IGNORED, Batch
from trainer.init import InitialWeights
from trainer.lr_schedule import Curve, LRSchedule
from trainer.mesh import make_meshes
from trainer.optim import build_optimizer
from trainer.parallel_dims import resolve
from trainer.step import TrainStep

GLOBAL_BATCH, SEQ_LEN, SEED = 8, 64, 7
WARMUP_STEPS = 20


def family_of(flavor: str) -> tuple[str, str]:
    """`debug_gqa` → llama3's, `qwen3/debug_gqa` → that family's."""
    family, _, name = flavor.rpartition("/")
    return family or "llama3", name


def args_of(flavor: str) -> ModelArgs:
    family, name = family_of(flavor)
    return get_family(family).flavors[name]


@dataclass(frozen=True)
class Layout:
    """Degrees and options as keys of the config's sections."""

    name: str
    world_size: int = 1
    parallelism: dict = field(default_factory=dict)
    training: dict = field(default_factory=dict)
    activation_checkpoint: str = "none"
    selective: str = "2"

    def config(self, flavor: str) -> Config:
        keys = {"mixed_precision_param": "float32", "seq_len": SEQ_LEN} | self.training
        degrees = Parallelism(**self.parallelism)
        dims = resolve(degrees, self.world_size)
        family, name = family_of(flavor)
        return Config(
            model=Model(name=family, flavor=name),
            training=Training(local_batch_size=GLOBAL_BATCH // dims.batch, **keys),
            parallelism=degrees,
            optimizer=Optimizer(lr=1e-3),
            activation_checkpoint=ActivationCheckpoint(
                mode=self.activation_checkpoint, selective_ac_option=self.selective
            ),
        )


def build_model(layout: Layout, flavor: str) -> TrainModel:
    """The model of a layout, initialised."""
    dims = resolve(layout.config(flavor).parallelism, layout.world_size)
    meshes = make_meshes(dims, "cpu")
    model = build(layout.config(flavor), args_of(flavor), dims, meshes, torch.device("cpu"))
    model.initialize(SEED)
    return model


def global_batch(step: int, *, seq_len: int = SEQ_LEN) -> Batch:
    """The same for every layout: counting up from a random token in random strides, which can be learnt.

    Samples have different numbers of ignored targets, so that a mean of means would show.
    """
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(2048, (GLOBAL_BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (GLOBAL_BATCH, seq_len + 1), generator=generator)
    tokens = (first + stride.cumsum(1)) % 2048
    targets = tokens[:, 1:].clone()
    for sample in range(GLOBAL_BATCH):
        targets[sample, : 5 * sample] = IGNORED
    return Batch(tokens[:, :-1], targets)


def own_batch(model: TrainModel, step: int) -> Batch:
    """This rank's samples of the global batch."""
    batch, mesh = global_batch(step), model.meshes["batch"]
    rank, degree = mesh.get_local_rank(), mesh.size()
    return Batch(batch.tokens.chunk(degree)[rank], batch.targets.chunk(degree)[rank])


def whole_loss(model: TrainModel, share: torch.Tensor) -> float:
    """Sum of the ranks' shares; tp ranks hold the same one."""
    total = share.detach().double()
    dist.all_reduce(total)
    return total.item() / model.meshes.dims.tp


def train(layout: Layout, flavor: str, steps: int) -> dict:
    """Losses, and gradient norms before clipping, of a few steps as `trainer/train.py` takes them."""
    config, model = layout.config(flavor), build_model(layout, flavor)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    # A warm-up as in any run: a tied model is chaotic without one, and amplifies rounding.
    warmup = Curve.of(WARMUP_STEPS, warmup_steps=WARMUP_STEPS, decay_ratio=0.0)
    schedule = LRSchedule(optimizer, warmup)
    train_step = TrainStep(
        model, model.meshes, max_norm=config.training.max_norm, local_batch_size=config.training.local_batch_size
    )
    losses, norms = [], []
    for step in range(steps):
        result = train_step.compute_gradients(own_batch(model, step), stop_requested=False)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return {"losses": losses, "norms": norms}


def first_gradients(layout: Layout, flavor: str) -> dict[str, torch.Tensor]:
    """Whole gradients of the first step, of the parameters that this rank has a part in."""
    model = build_model(layout, flavor)
    model.forward_backward(own_batch(model, 0), global_batch(0).num_valid_tokens)
    model.sum_tied_gradients()
    return {fqn: _whole(parameter.grad) for fqn, parameter in model.named_parameters().items()}


def initial_differences(layout: Layout, flavor: str) -> tuple[list[str], int]:
    """Parameters that do not start as the seed says, and how many were looked at."""
    model = build_model(layout, flavor)
    weights = InitialWeights(ModelInfo(family_of(flavor)[0], args_of(flavor)), seed=SEED)
    differing = []
    for fqn, tensor in model.state_dict().items():
        expected = torch.from_numpy(weights.read(fqn, Box.whole(weights.tensors[fqn].shape)))
        if not _whole(tensor).equal(expected):
            differing.append(fqn)
    return differing, len(model.state_dict())


def validate(layout: Layout, flavor: str) -> dict:
    """Validation losses before and after a step of training, on sequences of another length and an uneven batch."""
    model = build_model(layout, flavor)
    losses = []
    for step in range(2):
        batch = global_batch(100 + step, seq_len=2 * SEQ_LEN)
        mesh = model.meshes["batch"]
        mine = slice(mesh.get_local_rank(), None, mesh.size())
        losses.append(whole_loss(model, model.forward_loss(Batch(batch.tokens[mine], batch.targets[mine]))))
        losses[-1] /= batch.num_valid_tokens
        model.forward_backward(own_batch(model, step), global_batch(step).num_valid_tokens)
        with torch.no_grad():
            model.sum_tied_gradients()
            for parameter in model.named_parameters().values():
                parameter -= 0.1 * parameter.grad.to(parameter.dtype)
    return {"losses": losses}


class _CountCollectives(TorchDispatchMode):
    """How many functional collectives run: those of TP and CP, not FSDP's."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.startswith(("all_gather_into", "reduce_scatter"))
        return func(*args, **(kwargs or {}))


def count_collectives(layout: Layout, flavor: str) -> int:
    """Functional collectives of one forward and backward."""
    model = build_model(layout, flavor)
    with _CountCollectives() as counted:
        model.forward_backward(own_batch(model, 0), global_batch(0).num_valid_tokens)
    return counted.count


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
