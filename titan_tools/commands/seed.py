"""`titan seed`: write the initial weights as a checkpoint, sharded for the mesh of a config."""

from typing import Annotated

import typer

from converters.store.location import Location, locate
from titan_tools.commands.config_words import check_words
from titan_tools.commands.convert_options import DEFAULT_WORKERS, Json, Workers
from titan_tools.terminal.completion import complete_config


def seed(
    context: typer.Context,
    config: Annotated[
        str,
        typer.Argument(help="A TOML file, or the name of a preset.", metavar="CONFIG", autocompletion=complete_config),
    ],
    out: Annotated[Location, typer.Argument(help="The folder to create.", metavar="OUT", parser=locate)],
    workers: Workers = DEFAULT_WORKERS,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace OUT once the new one is complete; in a store, the old one is removed first."
        ),
    ] = False,
    ignore_memory: Annotated[
        bool,
        typer.Option("--ignore-memory", help="Start even if the values drawn at a time exceed the available memory."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the initial weights of a config's model as a DCP checkpoint, without building the model.

    \b
    Examples:
      titan seed debug seed
      titan seed llama3_8b seed-8b --parallelism.tensor_parallel_degree 8 --debug.seed 1
      titan seed llama3_70b seed-70b --parallelism.data_parallel_shard_degree 8 --training.dtype bfloat16 --workers 8

    They equal the weights that `titan train` starts with, for any mesh. To start from OUT:
    --checkpoint.initial_load_path OUT. Every key of the config can be given as --section.key VALUE;
    `titan config show CONFIG` lists them.
    """
    from converters.families.args import DecoderArgs
    from titan_tools.terminal.console import note, print_json, progress
    from trainer.config.load import load_config
    from trainer.job.chosen_model import NO_TOKENIZER
    from trainer.seed import job_of_seed
    from trainer.seed import seed as write_seed

    check_words(context, config)
    job = job_of_seed(load_config(config, context.args))
    report = write_seed(job, out, workers=workers, overwrite=overwrite, ignore_memory=ignore_memory, progress=progress)
    if not report.has_tokenizer and isinstance(job.args, DecoderArgs):
        note(NO_TOKENIZER)
    if as_json:
        print_json(report.to_json())
        return
    files = "1 file" if report.num_files == 1 else f"{report.num_files:,} files"
    print(
        f"{report.model}, {report.num_parameters:,} parameters, {report.dtype}, seed {report.seed}: {files}"
        f" for {report.mesh}, {report.num_bytes:,} bytes in {report.secs:.1f} s → {report.destination}"
    )
