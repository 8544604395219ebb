"""Location of a checkpoint: a path on this machine, or a URI such as `s3://bucket/run/step-100`."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from converters.common.errors import UnsupportedError

SCHEME = r"[a-z][a-z0-9+.-]*"
_URI = re.compile(rf"({SCHEME})://")
_LIKE_URI = re.compile(r"[A-Za-z][\w+.-]+:/")


@dataclass(frozen=True, slots=True)
class Location:
    """A path or a URI as text. A `Path` is never made of a URI: it would turn `s3://b/x` into `s3:/b/x`."""

    text: str

    @property
    def scheme(self) -> str:
        """The scheme of a URI; "" for a path."""
        match = _URI.match(self.text)
        return match[1] if match else ""

    @property
    def path(self) -> Path:
        """The path. Raises UnsupportedError for a URI."""
        if self.scheme:
            raise UnsupportedError(
                f"{self}: is not a path on this machine, which is needed here", hint="give a folder with a copy"
            )
        return Path(self.text)

    @property
    def name(self) -> str:
        """The last part: the name of a file or folder."""
        return self._parts.name

    @property
    def suffix(self) -> str:
        return self._parts.suffix

    @property
    def parent(self) -> "Location":
        return self._with(self._parts.parent)

    def resolved(self) -> "Location":
        """The path without links; a URI without a slash at its end."""
        return self._with(self._parts) if self.scheme else Location(str(self.path.resolve()))

    def is_inside(self, other: "Location") -> bool:
        """Whether this is `other` or below it, as far as the names say."""
        return self.scheme == other.scheme and self._parts.is_relative_to(other._parts)

    def absolute(self) -> "Location":
        """The path from the root of the file system; a URI as it is."""
        return self if self.scheme else Location(str(self.path.absolute()))

    def with_name(self, name: str) -> "Location":
        """The location of this name in the same folder."""
        return self._with(self._parts.with_name(name))

    def __truediv__(self, name: str) -> "Location":
        """A name in this folder. An absolute path, or a URI, stands for itself."""
        return locate(name) if _LIKE_URI.match(name) else self._with(self._parts / name)

    def __str__(self) -> str:
        return self.text

    @property
    def _parts(self) -> PurePosixPath:
        """The path; of a URI what follows `scheme:/`."""
        return PurePosixPath(self.text.removeprefix(f"{self.scheme}:/") if self.scheme else self.text)

    def _with(self, parts: PurePosixPath) -> "Location":
        return Location(f"{self.scheme}:/{parts}" if self.scheme else str(parts))


Place = str | Path | Location  # what the public functions take


def locate(place: Place) -> Location:
    """The location of a checkpoint that a user names; a path in the form in which `Path` shows it.

    Raises UnsupportedError for what is almost a URI: `S3://bucket/x`, or a `Path` made of one.
    """
    if isinstance(place, Location):
        return place
    text = str(place)
    if _LIKE_URI.match(text) and not _URI.match(text):
        raise UnsupportedError(
            f"{text}: neither a path nor a URI such as s3://bucket/run",
            hint="a scheme is in small letters and ends with ://, and no Path can hold one; of a folder with such a "
            "name, give the absolute path",
        )
    return Location(text if _URI.match(text) else str(Path(text)))
