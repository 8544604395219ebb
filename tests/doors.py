"""`convert` and `reshard` by keywords, for tests of all that their records hold."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from converters import convert as conversion
from converters import reshard as resharding
from converters.conversion.records import Request, Run
from converters.formats.registry import get_format
from converters.store.location import Location, Place, locate

_RUN = {field.name for field in fields(Run)}


def convert(
    src: Place,
    dst: Place,
    *,
    to: str,
    source: str | None = None,
    model_from: Path | str | None = None,
    **values: Any,
) -> conversion.ConvertReport:
    run = Run(**{name: values.pop(name) for name in _RUN & values.keys()})
    format = None if source is None else get_format(source)
    return conversion.convert(
        Request(_place(src), locate(dst), get_format(to), source=format, model_from=_path(model_from), **values), run
    )


def reshard(src: Place, dst: Place, *, model_from: Path | str | None = None, **values: Any) -> resharding.ReshardReport:
    run = Run(**{name: values.pop(name) for name in _RUN & values.keys()})
    return resharding.reshard(
        resharding.ReshardRequest(_place(src), locate(dst), model_from=_path(model_from), **values), run
    )


def _place(place: Place) -> Any:
    return place if isinstance(place, Location) else Path(place)


def _path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)
