"""The least memory of a rank is what its weights, gradients and moments really are."""

import pytest

from tests.dist.training import EXPERTS, LATENTS, Layout, args_of, build_model, make_step, own_batch
from trainer.job.job import resolve_job
from trainer.job.memory_bound import state_bytes
from trainer.optim.optimizer import build_optimizer
from trainer.ranks.mesh import local_part

pytestmark = pytest.mark.usefixtures("one_thread")

TP, CP, PP = "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"
EP, ETP = "expert_parallel_degree", "expert_tensor_parallel_degree"
REPLICAS, SCHEDULE = "data_parallel_replicate_degree", "pipeline_parallel_schedule"
ENDS_MEET = {PP: 2, SCHEDULE: "ZBVZeroBubble"}
BFLOAT16 = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}
CASES = [
    (Layout("FSDP 2 of three layers", 2), "deepseek_v3/debug_v3"),
    (Layout("DDP 2, bfloat16 moments", 2, {REPLICAS: 2}, {}, {"optimizer": {"state_dtype": "bfloat16"}}), "debug_gqa"),
    (Layout("PP 2 of tied embeddings", 2, {PP: 2}, BFLOAT16), "debug_tied"),
    (Layout("PP 2 of tied embeddings on one rank", 2, ENDS_MEET, BFLOAT16), "debug_tied"),
    (Layout("EP 2, offload", 2, {EP: 2}, {"enable_cpu_offload": True}), f"{EXPERTS}/debug_moe_mixed"),
    (
        Layout("FSDP 2 x TP 2, moments in fp32", 4, {TP: 2}, BFLOAT16, {"optimizer": {"state_dtype": "float32"}}),
        "debug_gqa",
    ),
    (Layout("EP 2 x TP 2, ETP 2", 4, {EP: 2, TP: 2, ETP: 2}), f"{LATENTS}/debug_v3"),
    (Layout("more ranks than experts", 4, {EP: 2}), f"{EXPERTS}/two_experts"),
    (Layout("HSDP 2 x CP 2", 4, {REPLICAS: 2, CP: 2}), "debug_tied"),
]


QUICK = ("PP 2 of tied embeddings on one rank", "EP 2, offload", "EP 2 x TP 2, ETP 2")


def state_of_a_step(layout: Layout, flavor: str) -> tuple[int, int]:
    """Case: bytes of what this rank holds at the end of backward, and the bound."""
    import torch.distributed as dist

    job = resolve_job(layout.config(flavor), layout.world_size, args=args_of(flavor))
    model = build_model(layout, flavor)
    optimizer = build_optimizer(model.named_parameters(), job.config.optimizer)
    summed_later = model.sum_tied_gradients
    found: list[int] = []

    def look() -> None:  # the follower of a tied embedding has its gradient until here
        parameters = [p for part in model.parts for p in part.parameters()]
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None), *model.named_buffers().values()]
        tensors += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        storages = {local_part(t).untyped_storage().data_ptr(): local_part(t).untyped_storage() for t in tensors}
        found.append(sum(storage.nbytes() for storage in storages.values()))
        summed_later()

    model.sum_tied_gradients = look  # type: ignore[method-assign]
    make_step(model, job.config, max_norm=1.0).compute_gradients(own_batch(model, 0))
    return found[0], *state_bytes(job, [dist.get_rank()])


@pytest.mark.parametrize(
    ("layout", "flavor"),
    [pytest.param(*case, id=case[0].name, marks=[pytest.mark.slow] * (case[0].name not in QUICK)) for case in CASES],
)
def test_the_bound_is_what_ranks_hold(pools, layout, flavor):
    for held, bound in pools[layout.world_size].run(state_of_a_step, layout, flavor):
        assert 0.99 * held <= bound <= held
