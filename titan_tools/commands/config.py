"""`titan config`: show, check, upgrade and create config files."""

from pathlib import Path
from typing import Annotated

import typer

from titan_tools.commands.config_words import check_words
from titan_tools.terminal.completion import TAKES_CONFIG, complete_config

config_app = typer.Typer(
    help="Show, check, upgrade and create config files.\n\n"
    "\b\nExamples:\n"
    "  titan config show debug\n"
    "  titan config init llama3_8b my_run.toml\n"
    "  titan config check my_run.toml --world-size 8",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Source = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a preset.", autocompletion=complete_config),
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@config_app.command("show", short_help="Print every value and where it comes from.", **TAKES_CONFIG)
def show(context: typer.Context, config: _Source, as_json: _Json = False) -> None:
    """Print every value of a config and where it comes from: default, file and line, or command line.

    \b
    Examples:
      titan config show debug
      titan config show llama3_8b --training.steps 500 --checkpoint.no_enable --json
    """
    from titan_tools.terminal.console import note, print_json, table
    from trainer.config import show as shown
    from trainer.config.load import load_config
    from trainer.job.job import derived_degrees

    check_words(context, config)
    loaded = load_config(config, context.args)
    if as_json:
        print_json(shown.as_json(loaded))
    else:
        table(shown.COLUMNS, shown.rows(loaded))
    for line in derived_degrees(loaded.parallelism):
        note(line)
    for line in shown.unread(loaded):
        note(f"not read: {line}")


@config_app.command("check", short_help="Check a config as training does.", **TAKES_CONFIG)
def check(
    context: typer.Context,
    config: _Source,
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size", min=1, metavar="N", help="Ranks of the job; default: as many as the degrees need."
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Check a config as training does: keys, values, model, and the layout on the given ranks. Exit code 0 or 2.

    What training uses is checked too: dump folder, tokenizer, data, the checkpoint that it resumes or starts from. If a
    path of a preset or a default does not exist yet, a note says so; others say if this machine's memory, disk or
    hardware cannot run the job.

    \b
    Examples:
      titan config check debug
      titan config check llama3_70b --world-size 256 --parallelism.tensor_parallel_degree 4
    """
    from titan_tools.launch.devices import find_device
    from titan_tools.terminal.console import count, note, print_json
    from trainer.config.load import load_config
    from trainer.config.show import unread
    from trainer.job.inputs import check_run
    from trainer.job.job import resolve_job
    from trainer.job.memory_bound import state_bytes

    check_words(context, config)
    loaded = load_config(config, context.args)
    job = resolve_job(loaded, world_size)
    dims, checked = job.dims, check_run(job, find_device(), has_all_files=False)
    bytes_by_rank = state_bytes(job, range(dims.world_size))
    not_here = [error.message for error in (checked.too_large, *checked.not_here) if error]
    if as_json:
        report = {"config": config, "world_size": dims.world_size, "not_read": unread(loaded)}
        memory = {
            "least_bytes_of_rank": max(bytes_by_rank),
            "least_bytes": sum(bytes_by_rank),
            "fits_here": checked.too_large is None,
        }
        print_json(report | {"not_checked": checked.open_points, "memory": memory, "not_here": not_here})
        return
    but = ", but not on this machine alone" if not_here else ""
    print(f"{config}: fine on {count(dims.world_size, 'rank')} ({dims}){but}")
    if dims.ep > 1:
        note(f"experts: {dims.of_experts}")
    for line in not_here:
        note(f"WARNING: not on this machine alone: {line}")
    for line in unread(loaded):
        note(f"not read: {line}")
    for line in checked.open_points:
        note(f"not checked: {line}")


@config_app.command("upgrade", short_help="Upgrade a file of an older torchtitan.")
def upgrade(
    old: Annotated[Path, typer.Argument(metavar="OLD.toml", help="The file to read.")],
    new: Annotated[Path | None, typer.Argument(metavar="NEW.toml", help="The file to write; default: stdout.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace the old file.")] = False,
    check_only: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if something would change.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Upgrade a TOML file of an older torchtitan: rename and move keys, and translate values.

    \b
    Examples:
      titan config upgrade old.toml new.toml
      titan config upgrade old.toml --check

    Comments and order are kept, and each change is reported with its reason. If something cannot be translated, it is
    listed and nothing is written (exit code 2). A current file is not changed.
    """
    from converters.common.errors import ConfigError, list_offenders
    from titan_tools.terminal.console import note, print_json
    from trainer.config.upgrade import upgrade, write_upgraded

    if (new is not None) + in_place + check_only > 1:
        raise ConfigError("one of NEW.toml, --in-place and --check")
    result = upgrade(old)
    if result.problems:
        raise ConfigError(
            f"{old} was not upgraded; these have no translation:" + list_offenders(result.problems, most=50),
            hint="change or remove them, then upgrade again",
        )
    out = old if in_place else new
    if out == old and not result.changes:
        out = None
    if out is not None:
        write_upgraded(result, out, replace=in_place)
    if as_json:
        report = {"changes": result.changes, "notes": result.notes, "refused_by_titan": result.refused}
        print_json(report | ({"written": None, "text": result.text} if out is None else {"written": str(out)}))
    else:
        for line in result.changes or [f"{old}: nothing to change"]:
            note(line)
        for line in result.notes:
            note(f"note: {line}")
        for line in result.refused:
            note(f"titan train will refuse: {line}")
        if out is not None:
            print(f"wrote {out}; try: titan config check {out}")
        elif not check_only and not in_place:
            print(result.text, end="")
    if check_only and result.changes:
        raise typer.Exit(1)


@config_app.command("init", short_help="Write a preset or a launch script to a file.")
def init(
    preset: Annotated[
        str | None, typer.Argument(metavar="PRESET", help="Preset or launch script; default: list them.")
    ] = None,
    out: Annotated[Path | None, typer.Argument(metavar="FILE", help="File to write; default: PRESET.toml.")] = None,
    as_json: _Json = False,
) -> None:
    """Write a preset to a file for editing, or a script that launches training; or list them.

    \b
    Examples:
      titan config init
      titan config init llama3_8b my_run.toml
      titan config init multinode_trainer.slurm
    """
    from titan_tools.terminal.console import print_json, table
    from trainer.config.preset import describe_presets, describe_scripts, preset_names, write_template

    if preset is None:
        if as_json:
            print_json({"presets": dict(describe_presets()), "launch_scripts": dict(describe_scripts())})
        else:
            table(("preset", "what"), [*describe_presets(), *describe_scripts()])
        return
    out = write_template(preset, out)
    if as_json:
        print_json({"preset": preset, "written": str(out)})
    else:
        print(f"wrote {out}" + (f"; try: titan config show {out}" if preset in preset_names() else ""))
