"""The `titan` command line: registers the commands and turns every error into a few lines and an exit code."""

import sys
from importlib.util import find_spec
from pathlib import Path

import typer

from converters.errors import TitanError
from titan_tools.commands.config import config_app
from titan_tools.commands.convert import convert_app
from titan_tools.commands.data import data_app
from titan_tools.commands.diff import diff
from titan_tools.commands.estimate_memory import estimate_memory
from titan_tools.commands.infer import infer
from titan_tools.commands.inspect import inspect
from titan_tools.commands.models import models
from titan_tools.commands.reshard import reshard
from titan_tools.commands.seed import seed
from titan_tools.commands.train import train
from titan_tools.commands.verify import verify

EXIT_CODES = """\b
Exit codes:
    0  done; the check passed, no difference found
    1  a check failed or a difference was found
    2  wrong usage or input, or not covered; nothing was done
    3  an error of titan's own
    4  training stopped by a numerical fault
    5  too close to call (estimate-memory)
   75  stopped on request after saving; start again to go on
  130  interrupted"""

app = typer.Typer(
    name="titan",
    help=f"Move, check, train and run LLM checkpoints, built around PyTorch Distributed Checkpoint.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}  # --section.key VALUE, read by the config

app.command("train", context_settings=_TAKES_OVERRIDES)(train)
app.command("infer")(infer)
app.command("seed", context_settings=_TAKES_OVERRIDES)(seed)
app.command("estimate-memory", context_settings=_TAKES_OVERRIDES)(estimate_memory)
app.add_typer(convert_app, name="convert")
app.command("reshard")(reshard)
app.command("inspect")(inspect)
app.command("diff")(diff)
app.command("verify")(verify)
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")
app.command("models")(models)


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run())


def run() -> int:
    """Run the command of sys.argv; the one place where errors become lines on stderr."""
    try:
        _refuse_foreign_packages()
        return app(standalone_mode=False) or 0
    except TitanError as error:
        _tell(error.message, hint=error.hint, tries=error.tries)
        return error.exit_code
    except typer.TyperException as error:  # unknown command or option, missing argument, bad value
        command = getattr(getattr(error, "ctx", None), "command_path", "titan")
        _tell(error.format_message(), tries=[f"{command} --help"])
        return 2
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        import traceback

        traceback.print_exc()
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
