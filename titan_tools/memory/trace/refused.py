"""What shows only while a step is traced: that it cannot be, and the nearest that can."""

from collections.abc import Mapping

from converters.errors import UnsupportedError


class NotTraceable(UnsupportedError):
    """`nearest`: keys of the config → values that would be traced instead."""

    def __init__(self, message: str, *, hint: str, nearest: Mapping[str, str]):
        super().__init__(message, hint=hint)
        self.nearest = dict(nearest)
