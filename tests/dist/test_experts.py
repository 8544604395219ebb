"""Mixtures of experts: any layout trains as one rank does, routes as it does, and moves the biases once per update."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from converters.families.qwen3 import QWEN3
from converters.families.registry import get_family
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from tests.dist import runs
from tests.dist.layouts import (
    AOT_EAGER,
    BUDGET,
    CP,
    EP,
    ETP,
    EVEN,
    EVERY_2ND,
    FULL,
    MICROBATCH,
    ONE_RANK,
    OP,
    PP,
    REPLICAS,
    SCHEDULE,
    TP,
)
from tests.dist.training import (
    BIASED_EXPERTS,
    EXPERTS,
    GLOBAL_BATCH,
    LATENTS,
    SCALED_EXPERTS,
    SEQ_LEN,
    WARMUP_STEPS,
    Layout,
    _gradients_of_a_step,
    args_of,
    build_model,
    count_collectives,
    differences_from_seed,
    make_step,
    on_a_fresh_compiler,
    own_batch,
    train,
)
from trainer.checkpoints.arrays import as_tensor
from trainer.models.biased_experts import BiasedExperts
from trainer.models.moe import GroupedExperts
from trainer.models.registry import get_trainer_family
from trainer.next_token.numbers import flops_per_token
from trainer.optim.lr_schedule import Curve, LRSchedule
from trainer.optim.optimizer import build_optimizer
from trainer.parallel import expert_shards
from trainer.parallel.context import head_tail_positions
from trainer.ranks.mesh import local_part

STEPS, FEW_STEPS = 20, 2
V3, V2, V2_LITE, EIGHT = (f"{LATENTS}/{name}" for name in ("debug_v3", "debug_v2", "debug_v2_lite", "eight_layers"))
MOONLIGHT, KIMI = f"{LATENTS}/debug_moonlight", f"{LATENTS}/debug_kimi"
MIXED, EVERY, OF_TWO = f"{EXPERTS}/debug_moe_mixed", f"{EXPERTS}/debug_moe", f"{EXPERTS}/two_experts"
TWICE = {"local_batch_size": 2}  # accumulation, on two ranks that share samples
WINDOW, OF_TWO_BIASED, EIGHT_BIASED = (
    f"{BIASED_EXPERTS}/{name}" for name in ("debug_window", "two_experts", "eight_layers")
)
SCOUT, MAVERICK, EIGHT_SCALED = (
    f"{SCALED_EXPERTS}/{name}" for name in ("debug_scout", "debug_maverick", "eight_layers")
)
EP2_EFSDP2 = Layout("ep 2 efsdp 2", 4, {EP: 2}, sections={"activation_checkpoint": OP})

CASES = [
    # experts on several ranks: whole ones, of each token shard; slices; cut along their columns
    (Layout("tp 4 ep 2", 4, {TP: 4, EP: 2}), MIXED),  # experts are sharded, the rest is not
    # latent attention: latents of token shards, whose weights are whole on every rank; gathered over context ranks
    (Layout("tp 2 cp 2 ep 2", 4, {TP: 2, CP: 2, EP: 2}), V2_LITE),
    # GPT-OSS: one of the ranks with slices of an expert adds the last bias
    (Layout("tp 2 ep 2 etp 2", 4, {TP: 2, EP: 2, ETP: 2}, sections={"activation_checkpoint": FULL}), WINDOW),
    # Llama 4: slices of shared and scaled experts; weights of rows that go elsewhere; fewer microbatches than stages
    (Layout("tp 2", 2, {TP: 2}, sections={"activation_checkpoint": OP}), MAVERICK),
    (Layout("ep 2 pp 2, one microbatch", 4, {EP: 2, PP: 2, MICROBATCH: 4}), SCOUT),
]
IN_TURN = [  # GPT-OSS and Llama 4 in every axis, pair of axes and way of recomputing
    Layout("fsdp 2", 2),
    Layout("fsdp 2, accumulated, full recomputation", 2, training=TWICE, sections={"activation_checkpoint": FULL}),
    Layout("fsdp 2, offloaded", 2, training={"enable_cpu_offload": True}),
    Layout("replicas 2", 2, {REPLICAS: 2}, sections={"activation_checkpoint": EVERY_2ND}),
    Layout("hsdp 2x2 ep 2", 4, {EP: 2, REPLICAS: 2}),
    Layout("tp 4", 4, {TP: 4}),
    Layout("fsdp 2 tp 2, operations kept", 4, {TP: 2}, sections={"activation_checkpoint": OP}),
    Layout("cp 2", 2, {CP: 2}),
    Layout("fsdp 2 cp 2, full recomputation", 4, {CP: 2}, sections={"activation_checkpoint": FULL}),
    Layout("ep 2 efsdp 2, operations kept", 4, {EP: 2}, sections={"activation_checkpoint": OP}),
    Layout("ep 4, accumulated", 4, {EP: 4}, training=TWICE),
    Layout("tp 2 ep 2", 2, {TP: 2, EP: 2}),
    Layout("fsdp 2 tp 2 ep 4", 4, {TP: 2, EP: 4}),
    Layout("tp 4 ep 2", 4, {TP: 4, EP: 2}),
    Layout("tp 2 cp 2 ep 2 etp 2", 4, {TP: 2, CP: 2, EP: 2, ETP: 2}),
    Layout("cp 2 pp 2", 4, {PP: 2, CP: 2, MICROBATCH: 2}),
    Layout("tp 2 pp 2", 4, {TP: 2, PP: 2, MICROBATCH: 2}),
]
OF_STAGES = [  # without a split backward, which masks do not take
    Layout("Interleaved1F1B ep 2", 4, {EP: 2, PP: 2, MICROBATCH: 2, SCHEDULE: "Interleaved1F1B"} | EVEN),
    Layout("LoopedBFS", 2, {PP: 2, MICROBATCH: 2, SCHEDULE: "LoopedBFS"} | EVEN),
    Layout("tp 2 ep 2 etp 2 pp 2", 8, {TP: 2, EP: 2, ETP: 2, PP: 2, MICROBATCH: 2}),
]
SLOW_CASES = [
    (
        Layout("fsdp 2, full recomputation, accumulated", 2, training=TWICE, sections={"activation_checkpoint": FULL}),
        MIXED,
    ),
    (Layout("cp 2", 2, {CP: 2}), MIXED),
    (Layout("pp 2, operations kept", 2, {PP: 2, MICROBATCH: 2}, sections={"activation_checkpoint": OP}), MIXED),
    (Layout("replicas 2", 2, {REPLICAS: 2}), MIXED),
    (Layout("tp 2 ep 2", 2, {TP: 2, EP: 2}), MIXED),
    (Layout("tp 2, full recomputation", 2, {TP: 2}, sections={"activation_checkpoint": FULL}), V3),
    (Layout("ep 2 pp 2", 4, {EP: 2, PP: 2, MICROBATCH: 2}), V3),
    (Layout("cp 2 ep 2", 2, {CP: 2, EP: 2}, sections={"activation_checkpoint": OP}), WINDOW),
    (Layout("tp 2 ep 2 etp 2", 4, {TP: 2, EP: 2, ETP: 2}, sections={"activation_checkpoint": FULL}), MIXED),
    (Layout("fsdp 2", 2), EVERY),
    (Layout("hsdp 2x2", 4, {REPLICAS: 2}), EVERY),
    (Layout("fsdp 2 pp 2", 4, {PP: 2, MICROBATCH: 2}), EVERY),
    (Layout("cp 2 pp 2", 4, {PP: 2, CP: 2, MICROBATCH: 2}), MIXED),
    (Layout("fsdp 2 cp 2", 4, {CP: 2}), EVERY),
    (Layout("Interleaved1F1B", 2, {PP: 2, MICROBATCH: 2, SCHEDULE: "Interleaved1F1B"}), EVERY),
    (Layout("ZBVZeroBubble", 2, {PP: 2, MICROBATCH: 1, SCHEDULE: "ZBVZeroBubble"}), EVERY),
    (Layout("fsdp 2, offloaded", 2, training={"enable_cpu_offload": True}), EVERY),
    (Layout("fsdp 8", 8), EVERY),  # two ranks have no expert
    (Layout("tp 2", 2, {TP: 2}), MIXED),
    (Layout("fsdp 2 tp 2", 4, {TP: 2}), EVERY),
    (Layout("ep 2", 2, {EP: 2}), EVERY),
    (Layout("ep 2, accumulated", 2, {EP: 2}, training=TWICE), MIXED),
    (Layout("ep 2, offloaded", 2, {EP: 2}, training={"enable_cpu_offload": True}), MIXED),
    (Layout("ep 4", 4, {EP: 4}, sections={"activation_checkpoint": OP}), EVERY),
    (Layout("ep 2 efsdp 2", 4, {EP: 2}), EVERY),
    (Layout("fsdp 2 tp 2 ep 2", 4, {TP: 2, EP: 2}), MIXED),
    (Layout("fsdp 2 tp 2 ep 4", 4, {TP: 2, EP: 4}), EVERY),
    (Layout("cp 2 ep 2", 2, {CP: 2, EP: 2}), MIXED),
    (Layout("tp 2 cp 2 ep 2 etp 2", 4, {TP: 2, CP: 2, EP: 2, ETP: 2}), MIXED),
    (Layout("ep 2 pp 2", 4, {EP: 2, PP: 2, MICROBATCH: 2}), MIXED),
    (Layout("ep 2 pp 2, Interleaved1F1B", 4, {EP: 2, PP: 2, MICROBATCH: 2, SCHEDULE: "Interleaved1F1B"}), EVERY),
    (Layout("ep 2 pp 2, ZBVZeroBubble", 4, {EP: 2, PP: 2, MICROBATCH: 1, SCHEDULE: "ZBVZeroBubble"}), MIXED),
    (Layout("hsdp 2x2 ep 2", 4, {EP: 2, REPLICAS: 2}), MIXED),
    (Layout("tp 2 ep 2 etp 2 pp 2", 8, {TP: 2, EP: 2, ETP: 2, PP: 2, MICROBATCH: 2}), MIXED),
    (Layout("fsdp 2, operations kept", 2, sections={"activation_checkpoint": OP}), V3),
    (Layout("hsdp 2x2", 4, {REPLICAS: 2}), V2),
    (Layout("replicas 2", 2, {REPLICAS: 2}), V2_LITE),
    (Layout("fsdp 2, offloaded", 2, training={"enable_cpu_offload": True}), V3),
    (Layout("tp 4", 4, {TP: 4}), V3),
    (Layout("tp 2, accumulated", 2, {TP: 2}, training=TWICE), V2_LITE),
    (Layout("fsdp 2 tp 2, operations kept", 4, {TP: 2}, sections={"activation_checkpoint": OP}), V2),
    (Layout("cp 2", 2, {CP: 2}), V3),
    (Layout("fsdp 2 cp 2, every 2nd layer recomputed", 4, {CP: 2}, sections={"activation_checkpoint": EVERY_2ND}), V2),
    (Layout("ep 2 efsdp 2", 4, {EP: 2}, sections={"activation_checkpoint": FULL}), V3),
    (Layout("ep 4", 4, {EP: 4}), V2),
    (Layout("tp 2 cp 2 ep 2 etp 2", 4, {TP: 2, CP: 2, EP: 2, ETP: 2}), V3),
    (Layout("tp 2 pp 2, the last stage with one layer", 4, {TP: 2, PP: 2, MICROBATCH: 2} | EVEN), V3),
    (Layout("cp 2 pp 2", 4, {PP: 2, CP: 2, MICROBATCH: 2}), V2_LITE),
    (Layout("Interleaved1F1B ep 2", 4, {EP: 2, PP: 2, MICROBATCH: 2, SCHEDULE: "Interleaved1F1B"} | EVEN), EIGHT),
    (Layout("ZBVZeroBubble", 2, {PP: 2, MICROBATCH: 1, SCHEDULE: "ZBVZeroBubble"} | EVEN), EIGHT),
    (Layout("tp 2 ep 2 etp 2 pp 2", 8, {TP: 2, EP: 2, ETP: 2, PP: 2, MICROBATCH: 2}), V3),
    (Layout("fsdp 2, full recomputation", 2, sections={"activation_checkpoint": FULL}), KIMI),
    (Layout("tp 2 ep 2 etp 2", 4, {TP: 2, EP: 2, ETP: 2}), KIMI),
    (Layout("tp 2 cp 2 ep 2", 4, {TP: 2, CP: 2, EP: 2}), MOONLIGHT),
    (Layout("ep 2 pp 2", 4, {EP: 2, PP: 2, MICROBATCH: 2}), MOONLIGHT),
    *((layout, flavor) for flavor in (WINDOW, MAVERICK) for layout in IN_TURN),
    *((layout, flavor) for flavor in (EIGHT_BIASED, EIGHT_SCALED) for layout in OF_STAGES),
    (EP2_EFSDP2, OF_TWO),
    (EP2_EFSDP2, OF_TWO_BIASED),
    (Layout("tp 2 ep 2 etp 2", 4, {TP: 2, EP: 2, ETP: 2}, sections={"activation_checkpoint": FULL}), SCOUT),
]
MODEL_ONLY = AOT_EAGER | {"components": ("model",)}
FSDP2_COMPILED = Layout("fsdp 2", 2, sections={"compile": MODEL_ONLY, "activation_checkpoint": OP})
BUDGET_COMPILED = Layout("budget", 2, sections=BUDGET | {"compile": BUDGET["compile"] | {"components": ("model",)}})
EP2_COMPILED = Layout("ep 2", 2, {EP: 2}, sections={"compile": MODEL_ONLY, "activation_checkpoint": OP})
TP2_EP2_COMPILED = Layout("tp 2 ep 2", 2, {TP: 2, EP: 2}, sections={"compile": MODEL_ONLY})
NEEDS_TORCH_2_13 = pytest.mark.skipif(
    not expert_shards.SHARDS_WITH_LAYER, reason="this torch nests FSDP modules in a layer"
)
CP2_COMPILED = Layout("cp 2", 2, {CP: 2}, sections={"compile": MODEL_ONLY, "activation_checkpoint": OP})
PP2_COMPILED = Layout("pp 2", 2, {PP: 2, MICROBATCH: 2}, sections={"compile": MODEL_ONLY})


def names(case) -> str:
    layout, flavor = case
    return f"{layout.name}-{flavor.rpartition('/')[2]}"


def margins(logits_TE: torch.Tensor, bias_E: torch.Tensor, router) -> torch.Tensor:
    """By how much a token's experts, and their groups, won."""
    logits_TE = logits_TE.double()  # in which the sigmoids of large ones differ
    choice_TE = (logits_TE.sigmoid() if router.score == "sigmoid" else logits_TE.softmax(-1)) + bias_E
    groups_TGS = choice_TE.unflatten(-1, (router.num_groups, -1))
    margin_T = torch.full(choice_TE.shape[:1], torch.inf)
    if router.top_groups < router.num_groups:
        rated_TG = groups_TGS.sort(descending=True).values[..., : router.best_of_group].sum(-1)
        order_TG = rated_TG.argsort(descending=True)
        best = rated_TG.gather(1, order_TG)
        margin_T = best[:, router.top_groups - 1] - best[:, router.top_groups]
        allowed = order_TG[:, : router.top_groups, None].expand(-1, -1, groups_TGS.shape[-1])
        choice_TE = groups_TGS.gather(1, allowed).flatten(1)
    best = choice_TE.topk(router.top_k + 1).values
    return torch.minimum(margin_T, best[:, -2] - best[:, -1])


class Routed:
    """The experts of every token of a forward pass, and by how much they won, of each layer with experts here."""

    def __init__(self, model):
        self.model = model
        self.calls: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.logits: dict[int, torch.Tensor] = {}
        for part in model.parts:
            for number, layer in part.layers.items():
                if hasattr(layer, "moe"):
                    layer.moe.router.gate.register_forward_hook(partial(self._keep_logits, int(number)))
                    layer.moe.router.register_forward_hook(self._hook(int(number)))

    def _keep_logits(self, number, gate, args, logits_TE):
        """A product of our own would be one of those that checkpointing by operation counts."""
        self.logits[number] = local_part(logits_TE.detach())

    def _hook(self, number):
        def keep(router, args, routes):
            if torch._C._current_graph_task_id() != -1:  # recomputation
                return
            with torch.no_grad():
                margin_T = margins(self.logits[number], args[1], router)
            self.calls.setdefault(number, []).append((routes.ids_TK.sort(dim=-1).values, margin_T))

        return keep

    def take(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Layer → ids [samples, positions, K] and margins [samples, positions] of this rank's tokens."""
        dims = self.model.meshes.dims
        num_ranks, num_samples = dims.cp * dims.tp, GLOBAL_BATCH // dims.batch  # that share a sequence
        taken = {}
        for number, calls in self.calls.items():
            wholes = [torch.cat(each) for each in zip(*calls, strict=True)]
            taken[number] = tuple(whole.reshape(num_samples, SEQ_LEN // num_ranks, -1).numpy() for whole in wholes)
        self.calls.clear()
        return taken


def train_and_look(layout: Layout, flavor: str, steps: int, *, sees_routes: bool = True) -> dict:
    """Case: first gradients, then of every step loss, norm, biases and routes of this rank's tokens and layers."""
    config, model = layout.config(flavor), build_model(layout, flavor)
    modules = [module for part in model.parts for module in part.modules()]
    own = [m for m in modules if isinstance(m, GroupedExperts | BiasedExperts) and isinstance(m, FSDPModule)]
    output = {"not as seeded": differences_from_seed(model, flavor), "experts in FSDP modules": len(own)}
    gradients = {fqn: g.numpy() for fqn, g in _gradients_of_a_step(model, config).items()}
    meshes, dims = model.meshes, model.meshes.dims
    samples = np.arange(GLOBAL_BATCH).reshape(dims.batch, -1)[meshes["batch"].get_local_rank()]
    cp_rank = meshes["cp"].get_local_rank()
    positions = (
        head_tail_positions(SEQ_LEN, cp_rank, dims.cp, torch.device("cpu")).numpy()
        if dims.cp > 1
        else np.arange(SEQ_LEN)
    )
    positions = positions.reshape(dims.tp, -1)[meshes["tp"].get_local_rank()]  # sequence parallelism
    routed = Routed(model) if sees_routes else None
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    schedule = LRSchedule(optimizer, Curve.of(WARMUP_STEPS, warmup_steps=WARMUP_STEPS, decay_ratio=0.0))
    train_step = make_step(model, config, max_norm=config.training.max_norm)
    made = []
    for step in range(steps):
        biases = {fqn: b.numpy().copy() for fqn, b in model.state_dict().items() if fqn.endswith("expert_bias")}
        result = train_step.run(own_batch(model, step), optimizer)
        routes = routed.take() if routed else {}
        model.forward_loss(own_batch(model, step + 1))  # as a validation, which must not be counted
        if routed:
            routed.calls.clear()
        optimizer.zero_grad()
        schedule.step()
        made.append(
            {
                "loss": result.loss,
                "norm": result.grad_norm,
                "loads": {load.layer: (load.max_over_mean, load.num_dead) for load in result.expert_loads},
                "biases": biases,
                "routes": routes,
            }
        )
    biases = {fqn: b.numpy().copy() for fqn, b in model.state_dict().items() if fqn.endswith("expert_bias")}
    return output | {
        "gradients": gradients, "steps": made, "last biases": biases, "samples": samples, "positions": positions,
    }  # fmt: skip


def routes_of_a_step(ranks: list[dict], step: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Layer → ids [GLOBAL_BATCH, SEQ_LEN, K] and margins [GLOBAL_BATCH, SEQ_LEN, 1], of all ranks' tokens."""
    whole: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for rank in ranks:
        place = np.ix_(rank["samples"], rank["positions"])
        for layer, found in rank["steps"][step]["routes"].items():
            if layer not in whole:
                whole[layer] = tuple(np.full((GLOBAL_BATCH, SEQ_LEN, each.shape[-1]), -1, each.dtype) for each in found)
            for target, values in zip(whole[layer], found, strict=True):
                target[place] = values
    assert all((ids >= 0).all() for ids, _ in whole.values())
    return whole


def biases_of(ranks: list[dict], what, number: int = 0) -> dict[str, np.ndarray]:
    """FQN → bias; equal on all ranks that hold it."""
    found: dict[str, np.ndarray] = {}
    for rank in ranks:
        held = rank[what] if what == "last biases" else rank["steps"][number]["biases"]
        for fqn, bias in held.items():
            assert np.array_equal(found.setdefault(fqn, bias), bias), fqn
    return found


@pytest.fixture(scope="module")
def trained(pools):
    """(layout, flavor, steps) → the output of each rank; trained once."""
    made = {}

    def run(layout: Layout, flavor: str, steps: int = STEPS) -> list[dict]:
        key = layout.name, flavor, steps
        if key not in made:
            made[key] = pools[layout.world_size].run(train_and_look, layout, flavor, steps)
        return made[key]

    return run


def assert_gradients_are_those_of_one_rank(one: dict, ranks: list[dict]) -> None:
    assert all(rank["not as seeded"] == [] for rank in ranks)
    assert set().union(*(rank["gradients"] for rank in ranks)) == set(one["gradients"])
    far = {}
    for rank in ranks:
        for fqn, gradient in rank["gradients"].items():
            wanted = one["gradients"][fqn]
            error = np.linalg.norm(gradient - wanted) / np.linalg.norm(wanted)
            if not error <= 1e-5:
                far[fqn] = error
    assert far == {}


def assert_trains_as_one_rank(one: dict, ranks: list[dict], flavor: str) -> None:
    args = args_of(flavor)
    agree, num_differing = True, 0
    num_steps = len(ranks[0]["steps"])
    for step, wanted in enumerate(one["steps"][:num_steps]):
        mine = routes_of_a_step(ranks, step)
        theirs = routes_of_a_step([one], step)
        if agree:
            assert biases_of(ranks, "steps", step).keys() == wanted["biases"].keys()
            for fqn, bias in biases_of(ranks, "steps", step).items():
                assert np.array_equal(bias, wanted["biases"][fqn]), (step, fqn)
        for layer, (ids, _) in mine.items():
            other, margins = theirs[layer]
            differs = (ids != other).any(axis=-1)
            if agree and differs.any():
                assert (margins[differs] <= 1e-4).all(), (step, layer)
                agree, num_differing = False, int(differs.sum())
        loss = ranks[0]["steps"][step]["loss"]
        assert loss == pytest.approx(wanted["loss"], rel=1e-6 if agree else 1e-4), (step, num_differing)
        if agree:
            assert ranks[0]["steps"][step]["norm"] == pytest.approx(wanted["norm"], rel=1e-5), step
        for rank in ranks:
            assert rank["steps"][step]["loss"] == loss
            assert rank["steps"][step]["loads"] == ranks[0]["steps"][step]["loads"]
        # the biases of the next step follow from the counts of this one
        after = biases_of(ranks, "steps", step + 1) if step + 1 < num_steps else biases_of(ranks, "last biases")
        for layer, (ids, _) in mine.items():
            counts = np.bincount(ids.flatten(), minlength=args.num_experts).astype(np.float64)
            assert counts.sum() == GLOBAL_BATCH * SEQ_LEN * args.experts_per_token
            move = np.sign(counts.mean() - counts)
            move = args.balance_rate * (move - move.mean())
            fqn = f"layers.{layer}.moe.expert_bias"
            np.testing.assert_allclose(after[fqn], biases_of(ranks, "steps", step)[fqn] + move, rtol=0, atol=3e-8)
            most, num_dead = ranks[0]["steps"][step]["loads"][layer]
            assert (most, num_dead) == pytest.approx((counts.max() / counts.mean(), (counts == 0).sum()))


@pytest.mark.parametrize("case", CASES, ids=names)
def test_a_layout_routes_and_trains_as_one_rank(trained, case):
    layout, flavor = case
    one, ranks = trained(ONE_RANK, flavor, FEW_STEPS)[0], trained(layout, flavor, FEW_STEPS)
    assert_gradients_are_those_of_one_rank(one, ranks)
    assert_trains_as_one_rank(one, ranks, flavor)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + SLOW_CASES, ids=names)
def test_a_layout_routes_and_trains_as_one_rank_over_many_steps(trained, case):
    layout, flavor = case
    one, ranks = trained(ONE_RANK, flavor)[0], trained(layout, flavor)
    assert_gradients_are_those_of_one_rank(one, ranks)
    assert_trains_as_one_rank(one, ranks, flavor)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + SLOW_CASES, ids=names)
def test_a_rerun_is_bit_equal_in_any_layout(pools, case):
    layout, flavor = case
    first, again = (pools[layout.world_size].run(train, layout, flavor, FEW_STEPS) for _ in range(2))
    assert first == again


def test_shared_experts_gather_and_sum_with_the_routed_ones(pools):
    """In forward and backward, where a mixture's backward is not counted: its collectives are not functional ones."""
    num_layers, num_mixtures = 3, 2
    both = 2 + 2 * num_layers + 2 * (num_layers - num_mixtures)  # embedding and output; attention; dense layers
    expected = {"all_gather": both + 3 * num_mixtures, "reduce_scatter": both + num_mixtures}  # tokens, ids and weights
    assert pools[2].run(count_collectives, Layout("tp 2", 2, {TP: 2}), V3) == [expected] * 2


def train_with_nested_experts(layout: Layout, flavor: str) -> dict:
    """Case: training as before torch 2.13, where experts are FSDP modules of their own."""
    kept, expert_shards.SHARDS_WITH_LAYER = expert_shards.SHARDS_WITH_LAYER, False
    try:
        return train_and_look(layout, flavor, 2)
    finally:
        expert_shards.SHARDS_WITH_LAYER = kept


@pytest.mark.parametrize(
    "flavor", [MIXED, *(pytest.param(flavor, marks=pytest.mark.slow) for flavor in (OF_TWO, OF_TWO_BIASED))]
)
def test_experts_in_fsdp_modules_of_their_own_train_as_one_rank(pools, trained, flavor):
    one, ranks = trained(ONE_RANK, flavor, FEW_STEPS)[0], pools[4].run(train_with_nested_experts, EP2_EFSDP2, flavor)
    assert all(rank["experts in FSDP modules"] > 0 for rank in ranks)
    assert_gradients_are_those_of_one_rank(one, ranks)
    assert_trains_as_one_rank(one, ranks, flavor)


@pytest.mark.parametrize(
    ("layout", "flavor", "num_graphs"),
    [
        pytest.param(FSDP2_COMPILED, MIXED, 2, marks=pytest.mark.slow),
        pytest.param(EP2_COMPILED, MIXED, 2, marks=[pytest.mark.slow, NEEDS_TORCH_2_13]),
        pytest.param(PP2_COMPILED, EVERY, 1, marks=pytest.mark.slow),
        pytest.param(BUDGET_COMPILED, EVERY, 1, marks=pytest.mark.slow),
        pytest.param(TP2_EP2_COMPILED, EVERY, 1, marks=[pytest.mark.slow, NEEDS_TORCH_2_13]),
        pytest.param(TP2_EP2_COMPILED, V3, 2, marks=[pytest.mark.slow, NEEDS_TORCH_2_13]),
        pytest.param(CP2_COMPILED, V2_LITE, 2, marks=pytest.mark.slow),
        pytest.param(BUDGET_COMPILED, V3, 2, marks=pytest.mark.slow),
        pytest.param(TP2_EP2_COMPILED, WINDOW, 2, marks=[pytest.mark.slow, NEEDS_TORCH_2_13]),
        pytest.param(FSDP2_COMPILED, MAVERICK, 3, marks=pytest.mark.slow),
        pytest.param(CP2_COMPILED, WINDOW, 2, marks=pytest.mark.slow),
        pytest.param(BUDGET_COMPILED, MAVERICK, 3, marks=pytest.mark.slow),
    ],
    ids=["fsdp 2", "ep 2", "pp 2", "budget", "tp 2 ep 2"]
    + ["DeepSeek, tp 2 ep 2", "DeepSeek, cp 2", "DeepSeek, budget"]
    + ["GPT-OSS, tp 2 ep 2", "Llama 4, fsdp 2", "GPT-OSS, cp 2", "Llama 4, budget"],
)
def test_compiled_blocks_are_compiled_once_whatever_the_routes_are(pools, trained, layout, flavor, num_graphs):
    """One graph for all layers of a kind; in validation, which has no gradients, another."""
    (one,) = trained(ONE_RANK, flavor, FEW_STEPS)
    train_unseen = partial(train_and_look, sees_routes=False)
    for found, graphs, breaks in pools[2].run(on_a_fresh_compiler, train_unseen, layout, flavor, FEW_STEPS):
        assert (graphs, breaks) == (2 * num_graphs, 0)
        for step in range(FEW_STEPS):
            assert found["steps"][step]["loss"] == pytest.approx(one["steps"][step]["loss"], rel=1e-6)
            for fqn, bias in found["steps"][step]["biases"].items():
                assert np.array_equal(bias, one["steps"][step]["biases"][fqn])


def gradients_with_one_rank_idle(layout: Layout, flavor: str) -> tuple[dict[str, np.ndarray], set[int]]:
    """Case: gradients where no token goes to the second half of the experts; the experts that were chosen."""
    config, model = layout.config(flavor), build_model(layout, flavor)
    for fqn, bias in model.state_dict().items():
        if fqn.endswith("expert_bias"):
            bias[len(bias) // 2 :] = -10.0
    routed = Routed(model)
    gradients = {fqn: g.numpy() for fqn, g in _gradients_of_a_step(model, config).items()}
    chosen = {int(e) for ids, _ in routed.take().values() for e in ids.flatten()}
    return gradients, chosen


def test_a_rank_whose_experts_get_no_token_takes_part(pools):
    ((wanted, chosen),) = pools[1].run(gradients_with_one_rank_idle, ONE_RANK, MIXED)
    assert max(chosen) == 5
    for found, _ in pools[2].run(gradients_with_one_rank_idle, Layout("tp 2 ep 2", 2, {TP: 2, EP: 2}), MIXED):
        for fqn, gradient in found.items():
            assert np.linalg.norm(gradient - wanted[fqn]) <= 1e-5 * np.linalg.norm(wanted[fqn]), fqn
        assert not found["layers.1.moe.experts.w1"][6:].any()


def biases_after_a_bad_step(implementation: str) -> list[tuple[bool, dict, dict]]:
    """Case: of three steps, the second with a loss of NaN: whether finite, the biases and the loads after it."""
    config, model = ONE_RANK.config(MIXED), build_model(ONE_RANK, MIXED)
    optimizer = build_optimizer(model.named_parameters(), replace(config.optimizer, implementation=implementation))
    train_step, found, forward_backward = make_step(model, config, max_norm=1.0), [], model.forward_backward
    for step in range(3):
        model.forward_backward = lambda *args, factor=(1, float("nan"), 1)[step]: forward_backward(*args) * factor
        result = train_step.run(own_batch(model, 0), optimizer)
        optimizer.zero_grad()
        biases = {fqn: b.numpy().copy() for fqn, b in model.state_dict().items() if fqn.endswith("expert_bias")}
        found.append((result.is_finite, biases, {load.layer: load.max_over_mean for load in result.expert_loads}))
    return found


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_skipped_step_moves_no_bias_and_its_tokens_do_not_count_later(pools, implementation):
    (steps,) = pools[1].run(biases_after_a_bad_step, implementation)
    assert [is_finite for is_finite, *_ in steps] == [True, False, True]
    (_, first, _), (_, second, _), (_, third, _) = steps
    for fqn, bias in first.items():
        assert np.array_equal(bias, second[fqn]) and not np.array_equal(bias, third[fqn])
        assert np.abs(third[fqn] - second[fqn]).max() < 2e-3  # of one step


def config_of_a_run(data, dump, *, flavor="debug_moe_mixed", **sections):
    return runs.make_config(
        data,
        dump,
        model={"name": "qwen3", "flavor": flavor},
        checkpoint={"keep_latest_k": 3},
        validation={"enable": True},
        **sections,
    )


def test_a_run_logs_loads_saves_biases_and_resumes_bit_by_bit(pools, data, tmp_path):
    flavor = "debug_moe"
    whole, resumed, args = tmp_path / "whole", tmp_path / "resumed", QWEN3.flavors[flavor]
    sections = runs.FSDP2 | {"activation_checkpoint": {"mode": "full"}, "debug": {"seed": 3}, "flavor": flavor}
    assert pools[2].run(runs.run, config_of_a_run(data, whole, **sections)) == ["", ""]
    runs.begin_from(resumed, whole, 2)
    assert pools[2].run(runs.run, config_of_a_run(data, resumed, **sections)) == ["", ""]
    assert runs.differences(resumed / "checkpoint" / "step-4", whole / "checkpoint" / "step-4") == []
    tensors = read_manifest(whole / "checkpoint" / "step-4").tensors
    biases = {fqn: t for fqn, t in tensors.items() if "expert_bias" in fqn}
    assert set(biases) == {f"layers.{n}.moe.expert_bias" for n in range(4)}
    assert all((t.dtype, t.shape) == ("float32", (12,)) for t in biases.values())
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for record in (record for record in records if "loss" in record):
        assert record["expert_load"] == max(record[f"expert_load/layer_{n}"] for n in range(4)) >= 1
        assert record["dead_experts"] == sum(record[f"dead_experts/layer_{n}"] for n in range(4))
        flops = flops_per_token(args, num_parameters=QWEN3.num_active_parameters(args), seq_len=runs.SEQ_LEN)
        assert record["tflops_per_rank"] * 1e12 == pytest.approx(record["tokens_per_sec_per_rank"] * flops)


@pytest.mark.slow
def test_a_run_of_deepseek_logs_resumes_and_is_exported_for_transformers(pools, data, tmp_path):
    """With its biases, for which V3 has a name; in another layout than the one it began in."""
    from transformers import AutoModelForCausalLM

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    model = {"name": "deepseek_v3", "flavor": "debug_v3"}
    saved = {"last_save_in_hf": True, "last_save_model_only": True, "export_dtype": "float32"}
    first = runs.make_config(data, whole, model=model, parallelism={EP: 2}, training={"local_batch_size": 1})
    assert pools[2].run(runs.run, first) == ["", ""]
    runs.begin_from(resumed, whole, 2)
    other = runs.make_config(data, resumed, model=model, parallelism={TP: 2}, checkpoint=saved)
    assert pools[2].run(runs.run, other) == ["", ""]
    losses, expected = runs.read_losses(resumed), runs.read_losses(whole)
    assert losses == pytest.approx({step: expected[step] for step in (3, 4)}, rel=1e-6)

    family = get_family("deepseek_v3")
    args = family.flavors["debug_v3"]
    attention = 6 * 3 * 4 * (24 + 20) * runs.SEQ_LEN  # 3 layers of 4 heads; features of q and k, and of v
    num_matmul = family.num_active_parameters(args) - args.vocab_size * args.dim
    record = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
    flops = 6 * num_matmul + attention
    assert record["tflops_per_rank"] * 1e12 == pytest.approx(record["tokens_per_sec_per_rank"] * flops)

    ours = get_trainer_family("deepseek_v3").build_model(args)
    step = resumed / "checkpoint" / "step-4"
    with open_native(step) as weights:
        read = {fqn: as_tensor(weights.read(fqn), t.dtype) for fqn, t in read_manifest(step).tensors.items()}
    assert all(read[f"layers.{n}.moe.expert_bias"].any() for n in (1, 2))
    ours.load_state_dict(read)
    theirs = AutoModelForCausalLM.from_pretrained(resumed / "export-hf", dtype=torch.float32).eval()
    tokens = torch.arange(48)[None] * 7 % 290
    with torch.no_grad():
        logits, output = ours(tokens), theirs(tokens).logits
    assert (logits - output).abs().max() <= 1e-5 * output.abs().max()
    for losses in pools[2].run(runs.first_losses, first, {"dcp": step, "hf": resumed / "export-hf"}):
        assert losses["dcp"] == losses["hf"]  # a run can start from either

    shutil.copytree(whole / "checkpoint" / "step-2", tmp_path / "foreign", ignore=shutil.ignore_patterns("titan_*"))
    start = {"initial_load_path": str(tmp_path / "foreign"), "initial_load_model_only": False}
    same = {"parallelism": {EP: 2}, "training": {"local_batch_size": 1}}
    config = runs.make_config(data, tmp_path / "next", steps=3, model=model, checkpoint=start, **same)
    (error, talk), _ = pools[2].run(runs.run_and_hear, config)
    assert error == "" and "if torchtitan v0.2.2 trained it, the model computed otherwise" in talk


@pytest.mark.slow
def test_a_run_goes_on_with_its_experts_on_other_ranks(pools, data, tmp_path):
    """Bit by bit in the same layout; in another from the same bits, with the same losses up to rounding."""
    whole, same, other = tmp_path / "whole", tmp_path / "same", tmp_path / "other"
    ep4 = {"parallelism": {EP: 4}, "training": {"local_batch_size": 1}}
    ep2_tp2 = {"parallelism": {EP: 2, TP: 2}}
    assert not any(pools[4].run(runs.run, config_of_a_run(data, whole, **ep4)))
    expected = runs.read_losses(whole)
    for dump, sections in ((same, ep4), (other, ep2_tp2)):
        runs.begin_from(dump, whole, 2)
        assert not any(pools[4].run(runs.run, config_of_a_run(data, dump, **sections)))
        found = runs.read_losses(dump)
        assert set(found) == {3, 4}
        assert all(found[step] == pytest.approx(expected[step], rel=1e-6 if dump is other else 0) for step in found)
    assert runs.differences(same / "checkpoint" / "step-4", whole / "checkpoint" / "step-4") == []


def test_biases_stay_fp32_where_parameters_are_bf16(pools, data, tmp_path):
    training = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}
    assert pools[2].run(runs.run, config_of_a_run(data, tmp_path, training=training)) == ["", ""]
    tensors = read_manifest(tmp_path / "checkpoint" / "step-4").tensors
    dtypes = {fqn: t.dtype for fqn, t in tensors.items() if fqn.startswith("layers.1.moe.")}
    assert dtypes.pop("layers.1.moe.expert_bias") == "float32"
    assert set(dtypes.values()) == {"bfloat16"} and len(dtypes) == 4


def test_a_run_without_balancing_is_exported_for_transformers(pools, data, tmp_path):
    from transformers import AutoModelForCausalLM

    config = config_of_a_run(data, tmp_path, training={"expert_balance_rate": 0.0, "steps": 2})
    saved = {"last_save_in_hf": True, "last_save_model_only": True, "export_dtype": "bfloat16"}
    config = replace(config, checkpoint=replace(config.checkpoint, **saved))
    assert pools[2].run(runs.run, config) == ["", ""]
    step = tmp_path / "checkpoint" / "step-2"
    dtypes = {fqn: t.dtype for fqn, t in read_manifest(step).tensors.items()}
    assert {fqn for fqn, dtype in dtypes.items() if dtype != "bfloat16"} == {"layers.1.moe.expert_bias"}
    ours = get_trainer_family("qwen3").build_model(QWEN3.flavors["debug_moe_mixed"])
    with open_native(step) as weights:
        read = {fqn: as_tensor(weights.read(fqn), dtypes[fqn]).float() for fqn in weights.tensors}
    ours.load_state_dict(read)
    # a run can start from either
    first = config_of_a_run(data, tmp_path / "next")
    for losses in pools[2].run(runs.first_losses, first, {"dcp": step, "hf": tmp_path / "export-hf"}):
        assert losses["dcp"] == losses["hf"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export-hf", dtype=torch.float32).eval()
    tokens = torch.arange(48)[None] * 7 % 290
    with torch.no_grad():
        logits, output = ours(tokens), theirs(tokens).logits
    assert (logits - output).abs().max() <= 1e-5 * output.abs().max()


@pytest.mark.slow
def test_biases_that_an_export_would_lose_are_reported_before_the_first_step(pools, data, tmp_path):
    balanced = config_of_a_run(data, tmp_path / "balanced", training={"steps": 2})
    assert pools[2].run(runs.run, balanced) == ["", ""]
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 1}  # rank 1 has the experts
    config = config_of_a_run(data, tmp_path, training={"expert_balance_rate": 0.0}, parallelism=parallelism)
    start = {"last_save_in_hf": True, "initial_load_path": str(tmp_path / "balanced" / "checkpoint" / "step-2")}
    for error in pools[2].run(runs.run, replace(config, checkpoint=replace(config.checkpoint, **start))):
        assert "layers.1.moe.expert_bias" in error and "--drop-expert-bias" in error
    assert not (tmp_path / "metrics.jsonl").exists()


def test_forced_balance_gives_every_expert_as_many_tokens(pools):
    layout = Layout("forced", 2, sections={"debug": {"moe_force_load_balance": True}})
    for rank in pools[2].run(train_and_look, layout, EVERY, 2):
        for step in rank["steps"]:
            assert all(load == (1.0, 0) for load in step["loads"].values()) and len(step["loads"]) == 4


def test_a_rate_of_zero_keeps_the_biases(pools):
    layout = Layout("not balanced", 1, training={"expert_balance_rate": 0.0})
    (rank,) = pools[1].run(train_and_look, layout, EVERY, 2)
    for fqn, bias in rank["steps"][0]["biases"].items():
        assert bias.any() and np.array_equal(bias, rank["last biases"][fqn])
