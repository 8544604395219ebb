"""titan convert: the same weights in another format. The commands are made from the records of the formats."""

import re
import shlex
from collections.abc import Callable, Sequence
from enum import StrEnum
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from converters.common.errors import TitanError
from converters.formats.base import OPTIONS, CommandHelp
from converters.formats.registry import FORMATS
from converters.store.location import Location, locate
from titan_tools.commands.convert_options import (
    DEFAULT_WORKERS,
    AllowExtra,
    AllowMissing,
    AllowNonfinite,
    DryRun,
    DType,
    Json,
    KeepExtra,
    Layers,
    ModelFrom,
    Mtp,
    NoDigest,
    Overwrite,
    Resume,
    Select,
    Source,
    TrainedBy,
    Trainer,
    Workers,
    format_option,
)


class _UnknownFormat(TitanError):
    """A command A-to-B of a format that there is not."""

    kind = "usage"


class _Pairs(TyperGroup):
    """The listed commands and, made when they are named, those of all other pairs of formats: `hf-to-meta`.

    `auto` is also made when it is named: a module of the user's may have registered formats.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        source, _, to = cmd_name.partition("-to-")
        if cmd_name == "auto":
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            _register_auto(alone)
            return typer.main.get_command(alone)
        if cmd_name in self.commands or not {source, to} <= FORMATS.keys():
            return super().get_command(ctx, cmd_name)
        a, b = FORMATS[source], FORMATS[to]
        text = f"Convert {a.called} to {b.called}: `titan convert auto --to {to}`, for this source only."
        help = CommandHelp(text, text, (f"{cmd_name} SRC DST", f"{cmd_name} SRC DST --dtype bfloat16 --dry-run"))
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        _register(alone, cmd_name, help, source=source, to=to, takes=b.takes, destination=b.destination_help)
        return typer.main.get_command(alone)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names. The error for A-to-B with an unknown format lists the formats."""
        source, is_pair, to = args[0].partition("-to-")
        unknown = [name for name in (source, to) if name not in FORMATS]
        if is_pair and unknown:
            paths = (
                args[1:3] if len(args) > 2 and not any(word.startswith("-") for word in args[1:3]) else ["SRC", "DST"]
            )
            raise _UnknownFormat(
                f"titan convert {args[0]}: {' and '.join(map(repr, unknown))}: no such format; there are"
                f" {', '.join(FORMATS)}",
                hint="the format of the source is found by itself",
                tries=[f"titan convert auto {shlex.join(paths)} --to {to if to in FORMATS else 'FORMAT'}"],
            )
        return super().resolve_command(ctx, args)


convert_app = typer.Typer(
    cls=_Pairs,
    help="Convert weights between Hugging Face, DCP, Meta's format, torch files and torchtune, at the speed and in the "
    "memory of a copy. A-to-B works for every pair of formats.\n\n"
    "\b\nExamples:\n"
    "  titan convert auto Llama-3.2-1B out.dcp --to dcp\n"
    "  titan convert dcp-to-hf outputs/checkpoint/step-1000 my-model\n"
    "  titan help convert auto",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_AUTO = CommandHelp(
    "Any format to any format.",
    "Convert a checkpoint of any format to any format. Also reads torchtitan's other layouts and torch files with "
    "unknown names.",
    (
        "auto Llama3.2-1B/original my-model --to hf",
        "auto checkpoint.pt llama-dcp --to dcp --model-from Llama-3.1-8B",
        "auto Llama-3.1-8B llama-8b.pt --to torch",
    ),
)


def _common_options(
    select: Select = None,
    model_from: ModelFrom = None,
    dtype: DType = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: AllowMissing = False,
    allow_extra: AllowExtra = False,
    allow_nonfinite: AllowNonfinite = False,
    mtp: Mtp = Layers.drop,
    keep_extra: KeepExtra = None,
    trained_by: TrainedBy = None,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """The signature that all convert commands share, in the order of their help pages."""


def _register(
    app: typer.Typer,
    name: str,
    help: CommandHelp,
    *,
    source: str | None,
    to: str | None,
    takes: Sequence[str],
    destination: str,
) -> None:
    """Add `titan convert NAME` to `app`. If `to` is None it is an option; `takes`: fields of OutputOptions."""

    def argument(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
        return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    dst = typer.Argument(metavar="DST", help=destination, show_default=False, parser=locate)
    parameters = [argument("src", Source), argument("dst", Annotated[Location, dst])]
    if to is None:
        option = typer.Option(help="The format to write.", show_default=False)
        names: Any = StrEnum("_FormatName", {name: name for name in FORMATS})  # type: ignore[misc]  # known at run time
        parameters.append(argument("to", Annotated[names, option]))
    for field in takes:
        option = format_option(field)
        parameters.append(argument(OPTIONS[field].parameter, Annotated[OPTIONS[field].kind | None, option], None))
    parameters += [argument(p.name, p.annotation, p.default) for p in signature(_common_options).parameters.values()]

    def command(
        *,
        src: Location,
        dst: Location,
        no_digest: bool,
        as_json: bool,
        mtp: Layers,
        trained_by: Trainer | None,
        **values: Any,
    ) -> None:
        from converters.conversion.records import Request, Run
        from converters.convert import convert
        from converters.formats.base import OutputOptions
        from converters.formats.registry import get_format
        from titan_tools.pages.conversion import print_conversion
        from titan_tools.terminal.console import print_json, progress

        chosen = {field: values.pop(OPTIONS[field].parameter) for field in takes}
        options = {field: OPTIONS[field].parse(value) for field, value in chosen.items() if value is not None}
        how = {name: values.pop(name) for name in ("workers", "resume", "overwrite", "dry_run")}
        request = Request(
            src,
            dst,
            get_format(to or str(values.pop("to"))),
            None if source is None else get_format(source),
            OutputOptions(**options),
            mtp=mtp.value,
            trained_by=None if trained_by is None else trained_by.value,
            **values,
        )
        report = convert(request, Run(digests=not no_digest, progress=progress, **how))
        if as_json:
            print_json(report.to_json())
        else:
            print_conversion(report)

    registered: Callable[..., None] = command
    registered.__doc__ = f"{help.text}\n\n\b\nExamples:\n" + "".join(
        f"  titan convert {line}\n" for line in help.examples
    )
    registered.__annotations__ = {p.name: p.annotation for p in parameters}
    registered.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, short_help=help.short)(registered)


def _register_auto(app: typer.Typer) -> None:
    """Add `titan convert auto`, which writes the formats that are registered now."""
    suffixes = {f.name: re.sub(", ([^,]*)$", r" or \1", ", ".join(f.file_suffixes)) for f in FORMATS.values()}
    single_files = ", ".join(f"--to {name} also takes a {text} file" for name, text in suffixes.items() if text)
    destination = f"The folder to create; {single_files}."
    _register(app, "auto", _AUTO, source=None, to=None, takes=list(OPTIONS), destination=destination)


_DCP = FORMATS["dcp"]
for _format in FORMATS.values():
    if _format.to_dcp:
        _register(
            convert_app,
            f"{_format.name}-to-dcp",
            _format.to_dcp,
            source=_format.name,
            to=_DCP.name,
            takes=_DCP.takes,
            destination=_DCP.destination_help,
        )
    if _format.from_dcp:
        _register(
            convert_app,
            f"dcp-to-{_format.name}",
            _format.from_dcp,
            source=_DCP.name,
            to=_format.name,
            takes=_format.takes,
            destination=_format.destination_help,
        )
_register_auto(convert_app)
