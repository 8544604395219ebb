"""`titan train`: start the ranks of a job, or be one of them."""

from typing import Annotated

import typer


def train(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help="A TOML file, or the name of a preset.", metavar="CONFIG")],
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks to start on this machine. Else all GPUs; without GPUs, what the degrees need."),
    ] = None,
) -> None:
    """Train a model, resuming where its folder left off.

    \b
    Examples:
      titan train debug --training.dataset_path data
      titan train config.toml --nproc 8 --parallelism.tensor_parallel_degree 2

    Every key of the config can be given as --section.key VALUE. Ranks are started here; under torchrun or a scheduler
    that has started them, this process joins as one. On SIGTERM or SIGUSR1 it saves after the step and exits with 75.
    """
    from converters.errors import ConfigError
    from converters.families.registry import get_family
    from titan_tools.launch import count_gpus, inside_launch, rank_errors, run_ranks
    from trainer.config.load import load_config
    from trainer.parallel_dims import check_layout, required_world_size, resolve

    settings = load_config(config, context.args)
    if inside_launch():
        with rank_errors():
            from trainer.train import main

            main(settings)
        return
    num_gpus = count_gpus()
    num_ranks = nproc or max(num_gpus, required_world_size(settings.parallelism))
    if num_ranks > num_gpus > 0:
        raise ConfigError(
            f"{num_ranks} ranks, but {num_gpus} GPU{'s' if num_gpus > 1 else ''} on this machine",
            hint="each rank needs a GPU of its own",
            tries=[
                f"degrees (--parallelism.…) that need {num_gpus}",
                "CUDA_VISIBLE_DEVICES= titan train …, to run on the CPU",
            ],
        )
    args = get_family(settings.model.name).flavors[settings.model.flavor]
    check_layout(settings, args, resolve(settings.parallelism, num_ranks))
    exit_code = run_ranks(["train", config, *context.args], nproc=num_ranks)
    if exit_code:
        raise typer.Exit(exit_code)
