"""`titan train`: start the ranks of a job, or run one of them."""

import os
from contextlib import nullcontext
from typing import Annotated

import typer

from titan_tools.commands.config_words import check_words
from titan_tools.terminal.completion import complete_config
from titan_tools.terminal.interrupts import Terminated


def train(
    context: typer.Context,
    config: Annotated[
        str,
        typer.Argument(help="A TOML file, or the name of a preset.", metavar="CONFIG", autocompletion=complete_config),
    ],
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Ranks to start on this machine. Default: all GPUs; without GPUs as many as the degrees need.",
        ),
    ] = None,
    nnodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Machines of the job; each runs this command. Needs --rdzv-endpoint.",
            show_default=False,
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address where the machines of --nnodes meet: one of them, and a free port on it.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Build one rank without memory or peers; report its parameters and collectives."
        ),
    ] = False,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks of the job of a dry run; default: as many as the degrees need."),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, metavar="N", help="The rank that a dry run builds.")] = 0,
    ignore_memory: Annotated[
        bool,
        typer.Option(
            "--ignore-memory",
            help="Start even if weights, gradients and optimizer states alone exceed the available memory.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON object on stdout.")] = False,
) -> None:
    """Train a model, or resume from the newest checkpoint of the run.

    \b
    Examples:
      titan train debug --training.dataset_path data
      titan train config.toml --nproc 8 --parallelism.tensor_parallel_degree 2
      titan train llama3_405b --dry-run --world-size 512
      titan train llama3_70b --nnodes 32 --rdzv-endpoint node0:29400

    Every key of the config can be given as --section.key VALUE; `titan config show CONFIG` lists them. The
    command starts the ranks; under torchrun or a scheduler it runs one of them. With --nnodes it starts those of one
    machine; the others are waited for as long as comm.init_timeout_seconds says. On SIGTERM or SIGUSR1 it saves after
    the step and exits with 75, on Ctrl-C with 130; a second one ends it at once.

    Environment: LOG_RANK=0,1 shows the log lines of these ranks (default 0). PYTORCH_ALLOC_CONF is set to
    expandable_segments:True unless it or PYTORCH_CUDA_ALLOC_CONF is set.
    """
    if dry_run:
        Terminated.error = None  # there is no run that a scheduler would start again
    from converters.common.errors import ConfigError
    from titan_tools.launch.launch import NodeOptions
    from titan_tools.launch.launched import has_all_ranks, started_by_titan
    from titan_tools.launch.rank import inside_launch, rank_errors, report_step_done
    from titan_tools.memory.allocator_settings import choose_allocator
    from titan_tools.terminal.console import note
    from trainer.config.load import load_config
    from trainer.observability.log import phase

    choose_allocator()  # before custom_import, which may load torch
    check_words(context, config)
    with nullcontext() if started_by_titan() else phase(f"reading {config}"):
        settings = load_config(config, context.args)
    nodes = NodeOptions(nproc, nnodes, rdzv_endpoint)
    if dry_run:
        from titan_tools.pages.dry_run import dry_run_from_command_line

        nodes.refuse("with --dry-run, which starts no ranks", tries=["--dry-run --world-size N"])
        dry_run_from_command_line(settings, world_size=world_size, rank=rank, as_json=as_json)
        return
    if world_size is not None or rank or as_json:
        raise ConfigError("--world-size, --rank and --json belong to --dry-run", tries=["--dry-run", "--nproc N"])
    is_launched = inside_launch()
    if os.environ.get("RANK", "0") == "0" and not started_by_titan():
        note(f"titan train {config}: {settings.described()}")
    if is_launched:
        variables = f"RANK = {os.environ['RANK']}, WORLD_SIZE = {os.environ['WORLD_SIZE']}"
        nodes.refuse(
            f"in a rank that torchrun or a scheduler has started already: {variables}",
            tries=["torchrun … titan train CONFIG, without these options", "titan train CONFIG with them, by itself"],
        )
        with rank_errors(less_memory=[f"titan estimate-memory {config} shows what takes the memory"]):
            from trainer.train import main

            tell_launcher = report_step_done if started_by_titan() else None
            main(settings, ignore_memory=ignore_memory, tell_launcher=tell_launcher, is_described=has_all_ranks())
        return

    from titan_tools.launch.training import start_training

    exit_code = start_training(config, settings, context.args, nodes, ignore_memory=ignore_memory)
    if exit_code:
        raise typer.Exit(exit_code)
