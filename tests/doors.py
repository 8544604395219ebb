"""`convert` and `reshard` by keywords, for tests of all that their records hold."""

from dataclasses import fields
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
    model_from: Place | None = None,
    **values: Any,
) -> conversion.ConvertReport:
    run = Run(**{name: values.pop(name) for name in _RUN & values.keys()})
    format = None if source is None else get_format(source)
    return conversion.convert(
        Request(locate(src), locate(dst), get_format(to), source=format, model_from=_located(model_from), **values), run
    )


def reshard(src: Place, dst: Place, *, model_from: Place | None = None, **values: Any) -> resharding.ReshardReport:
    run = Run(**{name: values.pop(name) for name in _RUN & values.keys()})
    return resharding.reshard(
        resharding.ReshardRequest(locate(src), locate(dst), model_from=_located(model_from), **values), run
    )


def _located(place: Place | None) -> Location | None:
    return None if place is None else locate(place)
