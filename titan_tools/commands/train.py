"""`titan train`: start the ranks of a job, or run one of them."""

import os
from contextlib import nullcontext
from typing import Annotated

import typer

from titan_tools.commands.config_words import check_words
from titan_tools.terminal.completion import complete_config


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

    Every key of the config can be given as --section.key VALUE; `titan config show CONFIG` lists them. The
    command starts the ranks; under torchrun or a scheduler it runs one of them. On SIGTERM or SIGUSR1 it saves after
    the step and exits with 75, on Ctrl-C with 130; a second one ends it at once.

    Environment: LOG_RANK=0,1 shows the log lines of these ranks (default 0). PYTORCH_ALLOC_CONF is set to
    expandable_segments:True unless it or PYTORCH_CUDA_ALLOC_CONF is set.
    """
    from converters.common.errors import ConfigError
    from titan_tools.launch.launched import started_by_titan
    from titan_tools.launch.rank import inside_launch, rank_errors, report_step_done
    from titan_tools.memory.allocator_settings import choose_allocator
    from titan_tools.terminal.console import count, note
    from trainer.config.load import load_config
    from trainer.observability.log import phase, shown_ranks

    choose_allocator()  # before custom_import, which may load torch
    check_words(context, config)
    with nullcontext() if started_by_titan() else phase(f"reading {config}"):
        settings = load_config(config, context.args)
    if dry_run:
        from titan_tools.pages.dry_run import dry_run_from_command_line

        dry_run_from_command_line(settings, world_size=world_size, rank=rank, as_json=as_json)
        return
    if world_size is not None or rank or as_json:
        raise ConfigError("--world-size, --rank and --json belong to --dry-run", tries=["--dry-run", "--nproc N"])
    is_launched = inside_launch()
    if os.environ.get("RANK", "0") == "0" and not started_by_titan():
        note(f"titan train {config}: {settings.described()}")
    if is_launched:
        with rank_errors(less_memory=[f"titan estimate-memory {config} shows what takes the memory"]):
            from trainer.train import main

            main(settings, ignore_memory=ignore_memory, tell_launcher=report_step_done if started_by_titan() else None)
        return

    from titan_tools.launch.agent import run_ranks
    from titan_tools.launch.devices import count_gpus, find_device, gpu_name
    from trainer.checkpoints.problems import is_saving
    from trainer.job.inputs import check_run, raise_all
    from trainer.job.job import required_world_size, resolve_job
    from trainer.job.run_header import header_lines
    from trainer.ranks.signals import interrupt_answer

    with phase("importing torch, to count GPUs"):
        device, num_gpus = find_device(), count_gpus()
    num_ranks = nproc or max(num_gpus, required_world_size(settings.parallelism))
    if num_ranks > num_gpus > 0:
        raise ConfigError(
            f"{num_ranks} ranks, but {num_gpus} GPU{'s' if num_gpus > 1 else ''} on this machine",
            hint="each rank needs its own GPU",
            tries=[
                f"degrees (--parallelism.…) that need {num_gpus}",
                "CUDA_VISIBLE_DEVICES= titan train …, to run on the CPU",
            ],
        )
    # Everything that can be refused without a rank is refused here
    job = resolve_job(settings, num_ranks, option="--nproc")
    shown_ranks(num_ranks)
    with phase("checking the config, the data and checkpoints"):
        checked = check_run(job, device)
    raise_all([error for error in (None if ignore_memory else checked.too_large, *checked.not_here) if error])
    for line in header_lines(checked, device=gpu_name() if num_gpus else "the CPU"):
        note(line)
    note(f"starting {count(num_ranks, 'rank')} …")
    passed = ["--ignore-memory"] if ignore_memory else []
    answer = interrupt_answer(saves=is_saving(settings.checkpoint))
    exit_code = run_ranks(["train", config, *passed, *context.args], nproc=num_ranks, interrupt_answer=answer)
    if exit_code:
        raise typer.Exit(exit_code)
