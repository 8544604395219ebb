"""The `titan` command line: register the commands; turn every error into a short message and an exit code."""

import atexit
import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from converters.common.errors import TitanError
from titan_tools.commands.config import config_app
from titan_tools.commands.convert import convert_app
from titan_tools.commands.data import data_app
from titan_tools.commands.diff import diff
from titan_tools.commands.download import download
from titan_tools.commands.estimate_memory import estimate_memory
from titan_tools.commands.infer import infer
from titan_tools.commands.inspect import inspect
from titan_tools.commands.models import models
from titan_tools.commands.reshard import reshard
from titan_tools.commands.seed import seed
from titan_tools.commands.train import train
from titan_tools.commands.verify import verify
from titan_tools.launch.failures import end_start_at_stop_request
from titan_tools.terminal.completion import TAKES_CONFIG
from titan_tools.terminal.console import note, print_error
from titan_tools.terminal.interrupts import Terminated, resend_swallowed_signals, terminate
from titan_tools.terminal.machine_errors import PIPE_CLOSED, as_machine_error, as_memory_error

EXIT_CODES = """\b
Exit codes:
    0  done; the check passed, no difference found
    1  a check failed or a difference was found
    2  wrong usage or input, or not supported: nothing was done;
       or an error in a module of yours (--import)
    3  internal error of titan
    4  training stopped at a NaN or infinite loss or gradient
    5  too close to call (estimate-memory)
   75  stopped on request after saving; the same command resumes
  130  interrupted by Ctrl-C
  143  ended by SIGTERM; no partial output is left"""


class _Interrupted(BaseException):
    """Ctrl-C. Typer would turn a KeyboardInterrupt into a silent exit."""


class _Commands(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:  # `titan help convert auto`
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in _SHORT if name in self.commands]  # Typer would list the groups last

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt as error:
            raise _Interrupted from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error


app = typer.Typer(
    name="titan",
    cls=_Commands,
    help="Convert, check, train and run LLM checkpoints, built around PyTorch Distributed Checkpoint.\n\n"
    f"`titan help COMMAND` shows the options and examples of a command.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_RUN_MODELS = ("seed", "estimate-memory", "train", "infer")  # commands that import torch
_IMPORT = "TITAN_IMPORT"  # passes --import to processes that this one starts


def _print_version(context: typer.Context, requested: bool) -> None:
    if not requested:
        return
    from titan_tools.installation import versions
    from titan_tools.terminal.console import print_json

    found = versions()
    if context.params["as_json"]:
        print_json(found)
    else:
        print(f"titan {found['titan']}")
    raise typer.Exit


@app.callback()
def _options_of_titan(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, help="Print the version.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            is_eager=True,  # known when --version is handled
            help="With --version: titan's version, those of the packages it works with, and what was tested together.",
        ),
    ] = False,
    module: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            envvar=_IMPORT,
            help="Import this module first, by name or path. It registers a family, dataset, loss or sink of your own.",
            show_default=False,
        ),
    ] = None,
) -> None:
    if as_json:
        context.fail(f"--json goes after the command: titan {context.invoked_subcommand} --json")
    if context.invoked_subcommand == "train" and "RANK" not in os.environ:
        end_start_at_stop_request()
    if context.invoked_subcommand in _RUN_MODELS:
        from titan_tools.installation import note_on_torch
        from titan_tools.launch.launched import started_by_titan

        is_first = os.environ.get("RANK", "0") == "0" and not started_by_titan()  # one line a launch
        if is_first and (untested := note_on_torch()):
            note(untested)
    if module:
        from trainer.config.custom_import import import_custom

        os.environ[_IMPORT] = import_custom(module, setting="--import {name}")  # for ranks that this process starts


# In the order of `titan --help`. Short enough that the page does not truncate them.
_SHORT = {
    "download": "Fetch a model from the Hugging Face hub.",
    "convert": "Convert weights to another format.",
    "reshard": "Reshard a DCP checkpoint for another mesh.",
    "inspect": "Show the contents of a checkpoint or a run.",
    "diff": "Compare two checkpoints of any formats.",
    "verify": "Check every byte of a checkpoint.",
    "seed": "Write the initial weights of a config's model.",
    "estimate-memory": "Estimate peak GPU memory of a run.",
    "data": "Prepare text for training.",
    "config": "Show, check, upgrade and create configs.",
    "train": "Train a model, or resume a run.",
    "infer": "Generate text from a checkpoint.",
    "models": "List families and flavors.",
}

app.command("download", short_help=_SHORT["download"])(download)
app.add_typer(convert_app, name="convert", short_help=_SHORT["convert"])
app.command("reshard", short_help=_SHORT["reshard"])(reshard)
app.command("inspect", short_help=_SHORT["inspect"])(inspect)
app.command("diff", short_help=_SHORT["diff"])(diff)
app.command("verify", short_help=_SHORT["verify"])(verify)
app.command("seed", short_help=_SHORT["seed"], **TAKES_CONFIG)(seed)
app.command("estimate-memory", short_help=_SHORT["estimate-memory"], **TAKES_CONFIG)(estimate_memory)
app.add_typer(data_app, name="data", short_help=_SHORT["data"])
app.add_typer(config_app, name="config", short_help=_SHORT["config"])
app.command("train", short_help=_SHORT["train"], **TAKES_CONFIG)(train)
app.command("infer", short_help=_SHORT["infer"])(infer)
app.command("models", short_help=_SHORT["models"])(models)


def main() -> None:
    """Run the command line and leave with its exit code."""
    resend_swallowed_signals({KeyboardInterrupt: (signal.SIGINT, None), Terminated: (signal.SIGTERM, terminate)})
    code = run()
    try:
        sys.stdout.flush()
    except OSError:  # already reported by `run`, or the reader is gone; Python would print it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    gc.freeze()  # else the interpreter's exit searches torch's objects for cycles, which takes a second
    # Torch unregisters its operators one by one when the interpreter exits, and a thread of gloo that frees a tensor
    # then aborts the rank (it waits for Python's lock, which is gone).
    is_rank = "RANK" in os.environ
    if is_rank or (sys.argv[1:2] == ["estimate-memory"] and threading.active_count() == 1):
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run() -> int:
    """Run the command of sys.argv; the only place that prints errors."""
    if sys.stdout is None:  # standard output is closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it lives as long as the process
    if sys.stderr is None:  # print would write these messages to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if (sys.stdout.encoding or "utf-8").lower().replace("_", "-") != "utf-8":  # tables have characters outside of it
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # typed as any TextIO
    if "RANK" not in os.environ:  # the launcher of a rank reads from its exit status that a signal ended it
        signal.signal(signal.SIGTERM, terminate)
    Terminated.error = None
    try:
        code = app(prog_name="titan", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except TitanError as error:
        return _print(error)
    except typer.TyperException as error:  # unknown command or option, missing argument, bad value
        return _print_usage_error(error)
    except (typer.Abort, _Interrupted, KeyboardInterrupt) as error:
        return print_error("interrupted", "interrupted", _notes(error), exit_code=130)
    except Terminated as error:
        if error.error:
            return _print(error.error)
        return print_error("terminated", "ended by SIGTERM", _notes(error), exit_code=128 + signal.SIGTERM)
    except SystemExit as error:  # raised by Typer after a completion, and in place of a BrokenPipeError
        if code := _print_error_of_import(error):
            return code
        return PIPE_CLOSED if error.code else 0
    except BrokenPipeError:  # `titan … | head`
        return PIPE_CLOSED
    except OSError as error:  # a path that cannot be read or written, without a handler closer to it
        if (titan_error := as_machine_error(error)) is None:
            return _print_internal_error(error)
        return _print(titan_error, tries=_fewer_workers() if error.errno == errno.ENOMEM else [])
    except Exception as error:
        if titan_error := as_memory_error(error):
            return _print(titan_error, tries=_fewer_workers())
        if "can't start new thread" in str(error):
            return _print(TitanError("no more threads can be started on this machine"), tries=_fewer_workers())
        return _print_internal_error(error)


def _print(error: TitanError, *, tries: Sequence[str] = ()) -> int:
    return print_error(error.kind, error.message, error.hint, tries or error.tries, error.exit_code)


def _fewer_workers() -> list[str]:
    """The `try:` line for a command that has --workers."""
    _, command = _current_command()
    return ["--workers 1"] if any("--workers" in option.opts for option in command.params) else []


def _current_command() -> tuple[str, Any]:
    """The innermost command that sys.argv names: its words, and the command itself."""
    path, command = "titan", typer.main.get_command(app)
    for word in sys.argv[1:]:
        if isinstance(command, TyperGroup) and (inner := command.get_command(typer.Context(command), word)):
            path, command = f"{path} {word}", inner
    return path, command


def _notes(error: BaseException) -> str:
    """Notes that cleanup code added to the exception."""
    return "; ".join(note for e in (error, error.__context__) for note in getattr(e, "__notes__", []))


def _print_usage_error(error: typer.TyperException) -> int:
    if "NoArgsIsHelp" in type(error).__name__:  # `titan`, `titan convert`: prints the help page
        print(error.format_message(), file=sys.stderr)
        return 2
    ctx = getattr(error, "ctx", None)  # missing for an option without its argument
    command = ctx.command_path if ctx else _current_command()[0]
    return print_error("usage", error.format_message().replace("Value error, ", ""), tries=[f"{command} --help"])


def _print_error_of_import(error: BaseException) -> int:
    """Print an error of a module that was imported; 0 for other errors."""
    custom = sys.modules.get("trainer.config.custom_import")  # not where `trainer` itself cannot be imported
    theirs = custom.error_of_import(error) if custom is not None else None
    if theirs is None:
        return 0
    shown, trace = theirs
    print(trace, end="", file=sys.stderr)
    return _print(shown)


def _print_internal_error(error: Exception) -> int:
    import traceback

    from titan_tools.installation import explain

    if code := _print_error_of_import(error):
        return code
    if problem := explain(error):
        return print_error("installation", *problem)
    from trainer.config.custom_import import where_to_look

    traceback.print_exception(error)
    return print_error("internal", f"{type(error).__name__}: {error}", where_to_look(), exit_code=3)
