"""The `titan` command line: registers the commands and turns every error into a few lines and an exit code."""

import sys
from importlib.util import find_spec
from pathlib import Path

import typer

from converters.errors import TitanError

EXIT_CODES = """\b
Exit codes:
    0  done; the check passed, no difference found
    1  a check failed or a difference was found
    2  wrong usage or input, or not covered; nothing was done
    3  an error of titan's own
    4  training stopped by a numerical fault
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


def _register() -> None:  # replaced by plain imports once every command file is there
    from importlib import import_module

    for name in ("inspect", "diff", "verify", "reshard", "seed", "estimate-memory", "train", "infer", "models"):
        try:
            module = import_module(f"titan_tools.commands.{name.replace('-', '_')}")
        except ModuleNotFoundError:
            continue
        settings = (
            {"allow_extra_args": True, "ignore_unknown_options": True}
            if name in ("train", "seed", "estimate-memory")
            else {}
        )
        app.command(name, context_settings=settings)(getattr(module, name.replace("-", "_")))
    for name in ("convert", "data", "config"):
        try:
            module = import_module(f"titan_tools.commands.{name}")
        except ModuleNotFoundError:
            continue
        app.add_typer(getattr(module, f"{name}_app"), name=name)


_register()


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
