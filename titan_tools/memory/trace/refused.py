"""What shows only while a step is traced: that it cannot be, and the nearest that can."""

from collections.abc import Iterator, Mapping

from converters.errors import UnsupportedError


class NotTraceable(UnsupportedError):
    """`nearest`: keys of the config → values that would be traced instead."""

    def __init__(self, message: str, *, hint: str, nearest: Mapping[str, str]):
        super().__init__(message, hint=hint)
        self.nearest = dict(nearest)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came of: compilers and pipelines put theirs around what a model did."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
