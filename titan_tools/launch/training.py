"""Start the ranks of a training run on this node: check everything that needs no rank first."""

from collections.abc import Sequence

from converters.common.errors import ConfigError
from titan_tools.launch.agent import run_ranks
from titan_tools.launch.devices import count_gpus, find_device, gpu_name
from titan_tools.launch.launch import Launch, NodeOptions, environment_of_ranks
from titan_tools.terminal.console import count, note
from trainer.checkpoints.problems import is_saving
from trainer.config.sections import Config
from trainer.job.inputs import check_run, raise_all
from trainer.job.job import required_world_size, resolve_job
from trainer.job.run_header import header_lines
from trainer.observability.log import phase, shown_ranks
from trainer.ranks.signals import interrupt_answer


def start_training(
    name: str, config: Config, overrides: Sequence[str], options: NodeOptions, *, ignore_memory: bool
) -> int:
    """Run `titan train NAME OVERRIDES` on the ranks of this node; return their exit code. `config`: what they give.

    Raises everything that can be refused without a rank.
    """
    rendezvous, nodes = options.rendezvous(config.comm.init_timeout_seconds), options.nodes or 1
    with phase("importing torch, to count GPUs"):
        device, num_gpus = find_device(), count_gpus()
    nproc = ranks_per_node(options.nproc, required_world_size(config.parallelism), num_gpus=num_gpus, nodes=nodes)
    passed = ["--ignore-memory"] if ignore_memory else []
    command = ("train", name, *passed, *overrides)
    launch = Launch(command, nproc, nodes, rendezvous, environment_of_ranks(nproc))
    job = resolve_job(config, launch.world_size, option="--nnodes × --nproc =" if rendezvous else "--nproc")
    shown_ranks(launch.world_size)
    with phase("checking the config, the data and checkpoints"):
        checked = check_run(job, device)
    too_large = None if ignore_memory or rendezvous else checked.too_large  # ranks of other nodes have their memory
    raise_all([error for error in (too_large, *checked.not_here) if error])
    if rendezvous:
        note(f"starting {count(nproc, 'rank')} of {launch.world_size}, with {nodes} nodes at {rendezvous} …")
    else:
        for line in header_lines(checked, device=gpu_name() if num_gpus else "the CPU"):
            note(line)
        note(f"starting {count(nproc, 'rank')} …")
    return run_ranks(launch, interrupt_answer=interrupt_answer(saves=is_saving(config.checkpoint)))


def ranks_per_node(asked: int | None, needed: int, *, num_gpus: int, nodes: int) -> int:
    """Number of ranks on each of `nodes`: as asked, else all GPUs, else what the degrees need, `needed`, in all.

    Raises ConfigError if there are fewer GPUs.
    """
    nproc = asked or max(num_gpus, -(-needed // nodes))
    if nproc > num_gpus > 0:
        raise ConfigError(
            f"{nproc} ranks, but {num_gpus} GPU{'s' if num_gpus > 1 else ''} on this machine",
            hint="each rank needs its own GPU",
            tries=[
                f"degrees (--parallelism.…) that need {num_gpus * nodes}",
                "CUDA_VISIBLE_DEVICES= titan train …, to run on the CPU",
            ],
        )
    return nproc
