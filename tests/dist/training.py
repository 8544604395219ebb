"""A few training steps in any layout, for parity tests: the build and the step of the trainer, on data made here."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from converters.common.box import Box
from converters.families import registry as families
from converters.families.args import DecoderArgs
from converters.families.parameters import Role
from converters.families.registry import get_family
from converters.families.rope import YarnRope
from converters.model.model_info import ModelInfo
from tests.models.gemma3 import GEMMA3
from trainer.build import build
from trainer.config.sections import ActivationCheckpoint, Config, Model, Optimizer, Parallelism, Training
from trainer.data.batch import IGNORED, TokenBatch
from trainer.job.job import resolve, resolve_job
from trainer.models import registry as trained_families
from trainer.models.initial_weights import InitialWeights
from trainer.models.initialization import Normal
from trainer.models.registry import get_trainer_family
from trainer.optim.lr_schedule import Curve, LRSchedule
from trainer.optim.optimizer import build_optimizer
from trainer.ranks.mesh import make_meshes
from trainer.step import TrainStep
from trainer.train_model import TrainModel

GLOBAL_BATCH, SEQ_LEN, SEED = 8, 64, 7
EXPERTS, LATENTS = "qwen3_experts", "deepseek_v3_experts"
BIASED_EXPERTS, SCALED_EXPERTS = "gpt_oss_experts", "llama4_experts"
WARMUP_STEPS = 20


def family_of(flavor: str) -> tuple[str, str]:
    """`debug_gqa` → llama3's, `qwen3/debug_gqa` → that family's."""
    family, _, name = flavor.rpartition("/")
    return family or "llama3", name


def args_of(flavor: str) -> DecoderArgs:
    family, name = family_of(flavor)
    if family.endswith("_biased"):
        _register_biased(family)
    elif family in (EXPERTS, LATENTS, BIASED_EXPERTS, SCALED_EXPERTS):
        _register_experts(family)
    elif family == GEMMA3.name:
        _register_gemma3()
    return get_family(family).flavors[name]


def _register_gemma3() -> None:
    """Layers and norms that no family of titan's has; the vocabulary is that of `global_batch`."""
    four_layers = replace(GEMMA3.flavors["tiny"], vocab_size=2048, num_layers=4, window_layers=(0, 1, 3))
    families.register(replace(GEMMA3, flavors={"debug": four_layers}))
    trained_families.register(GEMMA3.name)


def _register_biased(name: str) -> None:
    """A family whose one model has every bias that the family knows, none of them 0 at first, and YaRN."""
    family = get_family(name.removesuffix("_biased"))
    trained = get_trainer_family(family.name)
    changed = {"attention_bias": True, "mlp_bias": family.name == "llama3", "rope_scaling": YarnRope(4.0, 16)}
    flavors = {"debug_gqa": replace(family.flavors["debug_gqa"], **changed)}

    def initial_distribution(parameter, args):
        return Normal(0.1) if parameter.is_bias else trained.initial_distribution(parameter, args)

    families.register(replace(family, name=name, flavors=flavors, hf_architectures=()))
    trained_families.register(name, replace(trained, initial_distribution=initial_distribution))


def _register_experts(name: str) -> None:
    """A family with routers whose scores do not nearly tie, and with biases that are not 0 at first.

    `two_experts` of a family has fewer than most layouts have ranks. DeepSeek's norms of latents are not 1 at first,
    GPT-OSS's biases and sinks are not 0. `eight_layers` of a family are for several stages of a rank.
    """
    base = name.removesuffix("_experts")
    trained, family = get_trainer_family(base), get_family(base)
    flavors = dict(family.flavors)
    if name == EXPERTS:
        of_two = {"num_experts": 2, "experts_per_token": 1, "normalize_weights": False}
        flavors["two_experts"] = replace(flavors["debug_moe_mixed"], **of_two)
    elif name == BIASED_EXPERTS:
        flavors["two_experts"] = replace(flavors["debug_window"], num_experts=2, experts_per_token=1)
        flavors["eight_layers"] = replace(flavors["debug_window"], num_layers=8, window_layers=(0, 2, 4, 6))
    elif name == SCALED_EXPERTS:
        in_turn = {"sparse_layers": (1, 3, 5, 7), "layers_without_positions": (3, 7)}
        flavors["eight_layers"] = replace(flavors["debug_maverick"], num_layers=8, **in_turn)
    else:
        widths = {"head_dim": 32, "rotary_dim": 16, "value_dim": 32}
        flavors["float8"] = replace(flavors["debug_v3"], **widths)  # multiples of 16 on two tensor ranks
        flavors["eight_layers"] = replace(flavors["debug_v2"], num_layers=8, num_dense_layers=3)
        without_groups = replace(flavors["debug_v3"], num_groups=1, top_groups=1, rope_theta=5e4)
        moonlight = {"q_rank": 0, "num_shared_experts": 2, "route_scale": 2.446, "rope_scaling": None}
        yarn = YarnRope(32.0, 16, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)
        flavors["debug_moonlight"] = replace(without_groups, **moonlight)
        flavors["debug_kimi"] = replace(without_groups, route_scale=2.827, rope_scaling=yarn)

    def initial_distribution(parameter, args):
        drawn = {Role.ROUTER: Normal(1.0), Role.ROUTER_BIAS: Normal(0.1), Role.LATENT_NORM: Normal(1.0)}
        drawn[Role.SINK] = Normal(1.0)
        if parameter.is_bias:
            return Normal(0.2)
        return drawn.get(parameter.role) or trained.initial_distribution(parameter, args)

    families.register(replace(family, name=name, flavors=flavors, hf_architectures=()))
    trained_families.register(name, replace(trained, initial_distribution=initial_distribution))


@dataclass(frozen=True)
class Layout:
    """Degrees and options as keys of the config's sections."""

    name: str
    world_size: int = 1
    parallelism: dict = field(default_factory=dict)
    training: dict = field(default_factory=dict)
    sections: dict[str, dict] = field(default_factory=dict)

    def config(self, flavor: str) -> Config:
        degrees = Parallelism(**self.parallelism)
        dims = resolve(degrees, self.world_size)
        keys = {"mixed_precision_param": "float32", "seq_len": SEQ_LEN, "local_batch_size": GLOBAL_BATCH // dims.batch}
        family, name = family_of(flavor)
        config = Config(
            model=Model(name=family, flavor=name),
            training=Training(**keys | self.training),
            parallelism=degrees,
            optimizer=Optimizer(lr=1e-3),
            activation_checkpoint=ActivationCheckpoint(mode="none"),
        )
        changed = {section: replace(getattr(config, section), **keys) for section, keys in self.sections.items()}
        return replace(config, **changed)


def build_model(layout: Layout, flavor: str) -> TrainModel:
    """The model of a layout, initialised."""
    job = resolve_job(layout.config(flavor), layout.world_size, args=args_of(flavor))
    model = build(job, make_meshes(job.dims, "cpu"), torch.device("cpu"))
    model.initialize(SEED)
    return model


def global_batch(step: int, *, seq_len: int = SEQ_LEN) -> TokenBatch:
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
    return TokenBatch(tokens[:, :-1], targets)


def own_batch(model: TrainModel, step: int) -> TokenBatch:
    """This rank's samples of the global batch."""
    batch, mesh = global_batch(step), model.meshes["batch"]
    rank, degree = mesh.get_local_rank(), mesh.size()
    return TokenBatch(batch.tokens.chunk(degree)[rank], batch.targets.chunk(degree)[rank])


def whole_loss(model: TrainModel, share: torch.Tensor) -> float:
    """Sum of the ranks' shares; tp ranks hold the same one."""
    total = share.detach().double()
    dist.all_reduce(total)
    return total.item() / model.meshes.dims.tp


def train(layout: Layout, flavor: str, steps: int) -> dict:
    """Losses, and gradient norms before clipping, of a few steps as `trainer/train.py` takes them."""
    config = layout.config(flavor)
    return train_model(build_model(layout, flavor), config, steps)


def train_model(model: TrainModel, config: Config, steps: int) -> dict:
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    # A warm-up as in any run: a tied model is chaotic without one, and amplifies rounding.
    warmup = Curve.of(WARMUP_STEPS, warmup_steps=WARMUP_STEPS, decay_ratio=0.0)
    schedule = LRSchedule(optimizer, warmup)
    train_step = make_step(model, config, max_norm=config.training.max_norm)
    losses, norms = [], []
    for step in range(steps):
        result = train_step.run(own_batch(model, step), optimizer)
        optimizer.zero_grad()
        schedule.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return {"losses": losses, "norms": norms}


def first_gradients(layout: Layout, flavor: str) -> dict[str, torch.Tensor]:
    """Case: the first step's whole gradients, of the parameters that this rank has a part in."""
    return _gradients_of_a_step(build_model(layout, flavor), layout.config(flavor))


def _gradients_of_a_step(model: TrainModel, config: Config) -> dict[str, torch.Tensor]:
    # Unclipped: a scale that is off in its last digits would be in all of them
    make_step(model, config, max_norm=float("inf")).compute_gradients(own_batch(model, 0))
    gradients = {}
    for fqn, parameter in model.named_parameters().items():
        gradients[fqn], parameter.grad = _whole(parameter.grad), None
    return gradients


def make_step(model: TrainModel, config: Config, *, max_norm: float) -> TrainStep:
    return TrainStep(model, model.meshes, max_norm=max_norm, local_batch_size=config.training.local_batch_size)


def make_reference(layout: Layout, flavor: str, steps: int, path: Path) -> dict:
    """Case, one rank: train, and keep the first step's gradients and the last step's weights in a file."""
    output, found = _train_and_look(layout, flavor, steps)
    torch.save(found, path)
    return output | {"fqns": set(found["weights"])}


def compare(layout: Layout, flavor: str, steps: int, path: Path) -> dict:
    """Case: train as the reference did; losses, and how far each whole tensor is from the reference's.

    Distances are relative, in the L2 norm, of what this rank has a part in.
    """
    output, found = _train_and_look(layout, flavor, steps)
    reference = torch.load(path)
    for what, tensors in found.items():
        expected = reference[what]
        output[what] = {
            fqn: ((tensor - expected[fqn]).norm() / expected[fqn].norm()).item() for fqn, tensor in tensors.items()
        }
    return output


def _train_and_look(layout: Layout, flavor: str, steps: int) -> tuple[dict, dict[str, dict[str, torch.Tensor]]]:
    """First weights, validation, the gradients of a step, training, validation again, last weights."""
    config, model = layout.config(flavor), build_model(layout, flavor)
    output = {"not as seeded": differences_from_seed(model, flavor), "validated": [validation_loss(model)]}
    gradients = _gradients_of_a_step(model, config)
    output |= train_model(model, config, steps)
    output["validated"].append(validation_loss(model))
    weights = {fqn: _whole(parameter.detach()) for fqn, parameter in model.named_parameters().items()}
    return output, {"gradients": gradients, "weights": weights}


def differences_from_seed(model: TrainModel, flavor: str) -> list[str]:
    """Parameters that do not start as `titan seed` would write them."""
    weights = InitialWeights(ModelInfo(family_of(flavor)[0], args_of(flavor)), seed=SEED)
    differing = []
    for fqn, tensor in model.state_dict().items():
        expected = torch.from_numpy(weights.read(fqn, Box.whole(weights.tensors[fqn].shape)))
        if not _whole(tensor).equal(expected):
            differing.append(fqn)
    return differing


def validation_loss(model: TrainModel) -> float:
    """On sequences of another length and an uneven batch."""
    batch = global_batch(100, seq_len=2 * SEQ_LEN)
    mesh = model.meshes["batch"]
    mine = slice(mesh.get_local_rank(), None, mesh.size())
    loss = whole_loss(model, model.forward_loss(TokenBatch(batch.tokens[mine], batch.targets[mine])))
    return loss / batch.num_units


def on_a_fresh_compiler(case, layout: Layout, flavor: str, *args) -> tuple[Any, int, int]:
    """Case: another one; how many graphs it compiled, and breaks of them.

    The compiler remembers groups of ranks that are gone afterwards.
    """
    from torch._dynamo.utils import counters  # pools forget what was compiled after each case, if this was imported

    torch._dynamo.reset()
    counters.clear()
    try:
        text = case(layout, flavor, *args)
        return text, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    finally:
        torch._dynamo.reset()


class _CountCollectives(TorchDispatchMode):
    """How many functional collectives run: those of TP and CP, not FSDP's."""

    def __init__(self):
        super().__init__()
        self.count = {"all_gather": 0, "reduce_scatter": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for kind in self.count:
            self.count[kind] += func.__name__.startswith(f"{kind}_")
        return func(*args, **(kwargs or {}))


def count_collectives(layout: Layout, flavor: str) -> dict[str, int]:
    """Functional collectives of one forward and backward, by kind."""
    model = build_model(layout, flavor)
    with _CountCollectives() as counted:
        model.forward_backward(own_batch(model, 0), global_batch(0).num_units)
    return counted.count


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
