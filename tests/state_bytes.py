"""The bytes of a rank's parameters, gradients and moments: summed from shapes and degrees, and as a trace has them."""

from math import ceil, prod

from converters.common.dtypes import itemsize
from converters.families.parameters import Parameter
from converters.layout.mesh_shape import MeshShape
from titan_tools.memory.trace.events import Block, Trace
from trainer.job.record import Job


def state_bytes(job: Job, pp_rank: int) -> dict[str, int]:
    """The sum for a pipeline rank, built of nothing that a trace uses. The largest share where shares are uneven."""
    value_bytes = itemsize(job.config.training.dtype)
    moment_bytes = itemsize(job.config.optimizer.state_dtype or job.config.training.dtype)
    modules = {module for stage in job.split.stages_of(pp_rank) for module in job.split.modules[stage]}
    num_values = num_updated = 0
    for parameter in job.family.parameters(job.args):
        if not parameter.is_trained:
            continue
        num_local, module = prod(_local_shape(parameter, job.dims)), parameter.unit
        if module in modules:
            num_values, num_updated = num_values + num_local, num_updated + num_local
        is_tied = module == "tok_embeddings" and job.args.tied
        if is_tied and "output" in modules and job.split.num_stages > 1:  # the last stage has a copy
            num_values += num_local
            num_updated += 0 if job.split.first_and_last_on_one_rank else num_local
    bytes_of_values = num_values * value_bytes
    return {"parameters": bytes_of_values, "gradients": bytes_of_values, "optimizer": 2 * num_updated * moment_bytes}


def _local_shape(parameter: Parameter, dims: MeshShape) -> list[int]:
    sizes, cuts = list(parameter.shape), [(parameter.tp_dim, dims.tp), (0, dims.fsdp)]
    if parameter.expert_dim is not None and dims.ep > 1:
        has_more_ranks_than_experts = dims.efsdp * dims.ep > parameter.shape[parameter.expert_dim]
        cuts = [(parameter.expert_dim, dims.ep), (parameter.tp_dim, dims.etp)]
        cuts.append((1 if has_more_ranks_than_experts else 0, dims.efsdp))
    for dim, degree in cuts:
        if dim is not None:
            sizes[dim] = ceil(sizes[dim] / degree)
    return sizes


def traced_state_bytes(trace: Trace, job: Job) -> dict[str, int]:
    """The same bytes in a trace, at the end of its second step's update."""
    held = {"parameters": 0, "gradients": 0, "optimizer": 0}
    trained = {parameter.fqn for parameter in job.family.parameters(job.args) if parameter.is_trained}
    for block in live_at(trace, 2, "zero_grad"):
        if block.part in held and block.owner in trained and block.num_bytes > 4:  # those of a number of steps
            held[block.part] += block.num_bytes
    return held


def live_at(trace: Trace, step: int, phase: str) -> list[Block]:
    """The blocks that are held when a step comes to a phase for the first time."""
    live: dict[int, Block] = {}
    for segment, event in trace.events():
        if (segment.point.step, segment.point.phase) == (step, phase):
            break
        if event >= 0:
            live[event] = trace.blocks[event]
        else:
            del live[~event]
    return list(live.values())
