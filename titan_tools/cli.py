"""The `titan` command line: registers the commands and turns every error into a few lines and an exit code."""

import atexit
import errno
import gc
import os
import signal
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from converters.errors import TitanError
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
from titan_tools.lost_signals import raise_lost_ones_again
from titan_tools.machine_errors import PIPE_CLOSED, as_machine_error, as_memory_error

EXIT_CODES = """\b
Exit codes:
    0  done; the check passed, no difference found
    1  a check failed or a difference was found
    2  wrong usage or input, or not covered; nothing was done
    3  an error of titan's own
    4  training stopped by a numerical fault
    5  too close to call (estimate-memory)
   75  stopped on request after saving; start again to go on
  130  interrupted
  143  ended by SIGTERM; nothing half-made is left"""


class _Interrupted(BaseException):
    """Ctrl-C on its way out; of a KeyboardInterrupt Typer makes a silent exit."""


class _Commands(TyperGroup):
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:  # titan help convert auto: its help page
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return [name for name in _SHORT if name in self.commands]  # Typer would put the groups last

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error


app = typer.Typer(
    name="titan",
    cls=_Commands,
    help="Move, check, train and run LLM checkpoints, built around PyTorch Distributed Checkpoint.\n\n"
    f"`titan help COMMAND` has options and examples of a command.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_IMPORT = "TITAN_IMPORT"  # what --import names, for processes that this one starts
_TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}  # --section.key VALUE, read by the config


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"titan {version('titan-tools')}")
        raise typer.Exit


@app.callback()
def _options_of_titan(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    module: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            envvar=_IMPORT,
            help="First import this module, by name or path: it registers a family, data or a loss of your own.",
            show_default=False,
        ),
    ] = None,
) -> None:
    if module:
        from trainer.config.custom_import import import_custom

        os.environ[_IMPORT] = import_custom(module, told="--import {name}")  # for ranks that this process starts


# The order of `titan --help`: the life of a checkpoint. Lines of that page are short enough to be shown whole.
_SHORT = {
    "download": "Fetch a model from the Hugging Face hub.",
    "convert": "Put weights into another format.",
    "reshard": "Cut a DCP checkpoint for another mesh.",
    "inspect": "Show what a checkpoint or a run holds.",
    "diff": "Compare two checkpoints of any formats.",
    "verify": "Check every byte of a checkpoint.",
    "seed": "Write the first weights of a config's model.",
    "estimate-memory": "Say whether a run fits its GPUs.",
    "data": "Prepare text for training.",
    "config": "Show, check, upgrade and start configs.",
    "train": "Train a model, or go on where it stopped.",
    "infer": "Generate text from a checkpoint.",
    "models": "List families and flavors.",
}

app.command("download", short_help=_SHORT["download"])(download)
app.add_typer(convert_app, name="convert", short_help=_SHORT["convert"])
app.command("reshard", short_help=_SHORT["reshard"])(reshard)
app.command("inspect", short_help=_SHORT["inspect"])(inspect)
app.command("diff", short_help=_SHORT["diff"])(diff)
app.command("verify", short_help=_SHORT["verify"])(verify)
app.command("seed", short_help=_SHORT["seed"], context_settings=_TAKES_OVERRIDES)(seed)
app.command("estimate-memory", short_help=_SHORT["estimate-memory"], context_settings=_TAKES_OVERRIDES)(estimate_memory)
app.add_typer(data_app, name="data", short_help=_SHORT["data"])
app.add_typer(config_app, name="config", short_help=_SHORT["config"])
app.command("train", short_help=_SHORT["train"], context_settings=_TAKES_OVERRIDES)(train)
app.command("infer", short_help=_SHORT["infer"])(infer)
app.command("models", short_help=_SHORT["models"])(models)


def main() -> None:
    """Run the command line and leave with its exit code."""
    raise_lost_ones_again({KeyboardInterrupt: (signal.SIGINT, None), _Terminated: (signal.SIGTERM, _terminate)})
    code = run()
    try:
        sys.stdout.flush()
    except OSError:  # told by `run` already, or the reader has gone; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    gc.freeze()  # else Python's end searches all that torch has made for cycles: a second, also after Ctrl-C
    if sys.argv[1:2] == ["estimate-memory"] and threading.active_count() == 1:
        atexit._run_exitfuncs()  # and no more: torch would take back, piece by piece, what it has registered
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run() -> int:
    """Run the command of sys.argv; the one place where errors become lines on stderr."""
    if sys.stdout is None:  # started with a closed standard output
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it lives as long as the process
    if sys.stderr is None:  # print would put what is said there among the results
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if (sys.stdout.encoding or "utf-8").lower().replace("_", "-") != "utf-8":  # a table's lines are not in all of them
        sys.stdout.reconfigure(errors="replace")
    if "RANK" not in os.environ:  # ranks have a launcher, which tells from the signal that it was asked for
        signal.signal(signal.SIGTERM, _terminate)
    try:
        _refuse_foreign_packages()
        code = app(prog_name="titan", standalone_mode=False) or 0
        sys.stdout.flush()
        return code
    except TitanError as error:
        _tell(error.message, hint=error.hint, tries=error.tries)
        return error.exit_code
    except typer.TyperException as error:  # unknown command or option, missing argument, bad value
        return _tell_usage(error)
    except (typer.Abort, _Interrupted, KeyboardInterrupt) as error:
        _tell("interrupted", hint=_notes(error))
        return 130
    except _Terminated as error:
        _tell("ended by SIGTERM", hint=_notes(error))
        return 128 + signal.SIGTERM
    except SystemExit as error:  # Typer's, after a completion; or what it makes of a BrokenPipeError
        return PIPE_CLOSED if error.code else 0
    except BrokenPipeError:  # `titan … | head`: the reader has enough
        return PIPE_CLOSED
    except OSError as error:  # a place that cannot be read or written, met where nobody expected it
        if (told := as_machine_error(error)) is None:
            return _tell_fault(error)
        _tell(told.message, hint=told.hint, tries=_fewer_workers() if error.errno == errno.ENOMEM else [])
        return told.exit_code
    except Exception as error:
        if told := as_memory_error(error):
            _tell(told.message, hint=told.hint, tries=_fewer_workers())
            return told.exit_code
        if "can't start new thread" in str(error):
            _tell("no further thread can be started here", tries=_fewer_workers())
            return 2
        return _tell_fault(error)


class _Terminated(BaseException):
    """SIGTERM as an exception, so that what is being made is removed on the way out. Typer has its own use of exits."""


def _terminate(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut the removal short
    raise _Terminated


def _fewer_workers() -> list[str]:
    """What to try where the command that runs has workers."""
    _, command = _asked_command()
    return ["--workers 1"] if any("--workers" in option.opts for option in command.params) else []


def _asked_command() -> tuple[str, Any]:
    """The command that the command line names, as far as it names one: its words, and itself."""
    path, command = "titan", typer.main.get_command(app)
    for word in sys.argv[1:]:
        if isinstance(command, TyperGroup) and word in command.commands:
            path, command = f"{path} {word}", command.commands[word]
    return path, command


def _notes(error: BaseException) -> str:
    """What code on the way out had to say of an interruption."""
    return "; ".join(note for e in (error, error.__context__) for note in getattr(e, "__notes__", []))


def _tell_usage(error: typer.TyperException) -> int:
    if "NoArgsIsHelp" in type(error).__name__:  # `titan`, `titan convert`: the message is the help page
        print(error.format_message(), file=sys.stderr)
        return 2
    ctx = getattr(error, "ctx", None)  # not there for an option without its argument
    command = ctx.command_path if ctx else _asked_command()[0]
    _tell(error.format_message().replace("Value error, ", ""), tries=[f"{command} --help"])
    return 2


def _tell_fault(error: Exception) -> int:
    import traceback

    traceback.print_exception(error)
    _tell(f"{type(error).__name__}: {error}", hint="this is a fault of titan; the lines above say where")
    return 3


def _tell(message: str, *, hint: str = "", tries: tuple[str, ...] | list[str] = ()) -> None:
    lines = [f"error: {message}"]
    if hint:
        lines.append(f"hint: {hint}")
    lines += [f"try: {line}" for line in tries]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _refuse_foreign_packages() -> None:
    """`trainer` and `converters` are generic names: stop when somebody else's package would be imported instead."""
    home = Path(__file__).resolve().parent.parent
    for name in ("trainer", "converters"):
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if found != home:
            raise TitanError(
                f"the package {name!r} that Python finds is not titan's: {spec.origin if spec else 'none'}",
                hint="a folder of that name in the working directory or on PYTHONPATH hides it",
                tries=[f"python -P -m titan_tools {' '.join(sys.argv[1:])}".rstrip()],
            )
