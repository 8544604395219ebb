"""Mixed precision on one rank: the numbers of FSDP over one rank, to the last bit."""

import pytest
import torch

from tests.dist import runs
from tests.dist.training import Layout, build_model, global_batch, own_batch, train_model
from trainer import build
from trainer.parallel import fsdp
from trainer.parallel.fsdp import computes_in_copies

BF16 = {"mixed_precision_param": "bfloat16"}
FULL = {"activation_checkpoint": {"mode": "full"}}
EVERY_OTHER = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}
OP = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
COMPILED = {"compile": {"enable": True, "backend": "aot_eager"}}
INDUCTOR = {"compile": {"enable": True, "backend": "inductor"}}
FLOAT8 = {
    "model": {"converters": ("quantize.linear.float8",)},
    "float8": {"emulate": True, "filter_fqns": ("layers.0.",)},  # the output is converted
}
LAYOUTS = {
    "no checkpointing": Layout("", 1, {}, BF16),
    "full": Layout("", 1, {}, BF16, FULL),
    "every other layer": Layout("", 1, {}, BF16, EVERY_OTHER),
    "op": Layout("", 1, {}, BF16, OP),
    "accumulated": Layout("", 1, {}, BF16 | {"local_batch_size": 2}, FULL),
    "bf16 weights": Layout("", 1, {}, {"dtype": "bfloat16", "mixed_precision_param": "float32", "local_batch_size": 2}),
    "plain loss": Layout("", 1, {}, BF16 | {"loss": "plain"}),
    "chunks": Layout("", 1, {}, BF16 | {"loss_chunks": 7}),
    "never": Layout("", 1, {"fsdp_reshard_after_forward": "never"}, BF16),
    "compiled": Layout("", 1, {}, BF16, COMPILED | OP),
    "inductor": Layout("", 1, {}, BF16, INDUCTOR),
    "float8": Layout("", 1, {}, BF16, FLOAT8 | FULL),
    "bf16 moments": Layout("", 1, {}, BF16, {"optimizer": {"state_dtype": "bfloat16"}}),
}
OFTEN = {"debug_gqa": {"bf16 weights"}}
NUM_STEPS = 5


def train_and_look(layout: Layout, flavor: str, with_fsdp: bool) -> dict:
    """Case: losses, norms, and the last weights."""
    if with_fsdp:
        build.computes_in_copies = fsdp.computes_in_copies = lambda *_: False
    try:
        model = build_model(layout, flavor)
        is_sharded = any(isinstance(p, torch.distributed.tensor.DTensor) for p in model.named_parameters().values())
        assert is_sharded == with_fsdp
        found = train_model(model, layout.config(flavor), NUM_STEPS)
        found["validation"] = model.forward_loss(own_batch(model, 0)).item()
    finally:
        build.computes_in_copies = fsdp.computes_in_copies = computes_in_copies
    weights = {fqn: getattr(tensor, "full_tensor", lambda t=tensor: t)() for fqn, tensor in model.state_dict().items()}
    return found | {"weights": weights}


FLAVORS = [
    *((flavor, name) for flavor in ("debug_gqa", "debug_tied") for name in LAYOUTS),
    *(("qwen3/debug_moe_mixed", name) for name in LAYOUTS),
]


def _is_slow(flavor: str, name: str) -> bool:
    return name not in OFTEN.get(flavor, ())


@pytest.mark.parametrize(
    ("flavor", "name"), [pytest.param(*case, marks=[pytest.mark.slow] * _is_slow(*case)) for case in FLAVORS]
)
def test_numbers_are_those_of_fsdp_over_one_rank(pools, flavor, name):
    (ours,) = pools[1].run(train_and_look, LAYOUTS[name], flavor, False)
    (fsdps,) = pools[1].run(train_and_look, LAYOUTS[name], flavor, True)
    weights, expected = ours.pop("weights"), fsdps.pop("weights")
    assert ours == fsdps
    assert weights.keys() == expected.keys() and all(torch.equal(weights[fqn], expected[fqn]) for fqn in weights)


def copies_alive(layout: Layout) -> dict[str, int]:
    """Case: bytes of the copies that modules show after forward, then and later."""
    model = build_model(layout, "debug_tied")
    (part,) = model.parts
    shown: dict[int, torch.Tensor] = {}
    found = {"whole": 2 * sum(p.numel() for p in model.named_parameters().values())}

    def look(when: str) -> None:
        found[when] = sum(p.untyped_storage().nbytes() for p in shown.values())

    def after_forward(*_) -> None:
        if torch.is_grad_enabled():
            shown.update({id(p): p for p in part.parameters()})
            look("after forward")

    part.register_forward_hook(after_forward)
    model.forward_backward(own_batch(model, 0), global_batch(0).num_units)
    look("after backward")
    model.forward_loss(own_batch(model, 0))
    look("after validation")
    assert all(p.dtype == torch.bfloat16 for p in shown.values())
    assert all(p.dtype == torch.float32 for p in part.parameters())
    return found


def test_copies_live_from_forward_to_backward(pools):
    (found,) = pools[1].run(copies_alive, LAYOUTS["no checkpointing"])
    assert found["after forward"] == found["whole"] > 0
    assert found["after backward"] == found["after validation"] == 0


@pytest.mark.parametrize(
    ("parallelism", "training", "float8", "expected"),
    [
        ({}, BF16, {}, True),
        ({"fsdp_reshard_after_forward": "never"}, BF16, {}, True),
        ({"fsdp_reshard_after_forward": "always"}, BF16, {}, False),
        ({}, BF16 | {"enable_cpu_offload": True}, {}, False),
        ({}, BF16, {"enable_fsdp_float8_all_gather": True}, False),
        ({}, {"mixed_precision_param": "float32"}, {}, False),
        ({}, BF16 | {"dtype": "bfloat16"}, {}, False),
    ],
)
def test_fsdp_is_used_where_the_config_asks_for_what_only_it_does(parallelism, training, float8, expected):
    from converters.layout.mesh_shape import MeshShape
    from trainer.config.sections import Float8, Parallelism, Training

    sections = Training(**training), Parallelism(**parallelism), Float8(**float8)
    assert computes_in_copies(*sections, MeshShape()) == expected
    assert not computes_in_copies(*sections, MeshShape(tp=2))


def test_a_checkpoint_is_that_of_fsdp(pools, data, tmp_path):
    for name, parallelism in (("ours", {}), ("fsdps", {"fsdp_reshard_after_forward": "always"})):
        config = runs.make_config(data, tmp_path / name, parallelism=parallelism, training=BF16)
        assert pools[1].run(runs.run, config) == [""]
    for step in (2, 4):
        steps = [tmp_path / name / "checkpoint" / f"step-{step}" for name in ("ours", "fsdps")]
        assert runs.differences(*steps) == []

    # and resuming from it is bit-equal
    runs.begin_from(tmp_path / "again", tmp_path / "ours", 2)
    assert pools[1].run(runs.run, runs.make_config(data, tmp_path / "again", training=BF16)) == [""]
    last = "checkpoint/step-4"
    assert runs.differences(tmp_path / "again" / last, tmp_path / "ours" / last) == []
