"""Which files of a repository make a checkpoint: one set of weights, and the small files that belong to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

_SMALL = ("*.json", "*.model", "*.jinja", "*.tiktoken", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*", "USE_POLICY*")
_WEIGHTS = (("*.safetensors",), ("*.bin",), ("*.pth", "*.pt"))  # the first kind that is there
_INDEXES = ("*.safetensors.index.json", "*.bin.index.json")
_REPEATED = "consolidated*.safetensors"  # some repositories hold the same weights again under this name
_ORIGINAL = "original/"  # Meta's own files, beside the same weights as safetensors


@dataclass(frozen=True, slots=True)
class Choice:
    """What is wanted: `include` replaces titan's own choice, `exclude` comes off at the end."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    original: bool = False

    def of(self, names: Sequence[str]) -> list[str]:
        """The wanted ones of a repository's files."""
        chosen = [n for n in names if _matches(n, self.include)] if self.include else by_default(names)
        if self.original:
            chosen += [n for n in names if n.startswith(_ORIGINAL) and n not in chosen]
        return [n for n in chosen if not _matches(n, self.exclude)]


def by_default(names: Sequence[str]) -> list[str]:
    """Small files and one set of weights. Folders inside hold other forms of the same (original/, onnx/)."""
    top = [n for n in names if "/" not in n]
    kind = next((k for k in _WEIGHTS if any(_matches(n, k) for n in top)), ())
    unwanted = [index for index in _INDEXES if not any(index.startswith(weights) for weights in kind)]
    if any(_matches(n, kind) and not fnmatch(n, _REPEATED) for n in top):
        unwanted.append(_REPEATED)
    return [n for n in top if _matches(n, (*_SMALL, *kind)) and not _matches(n, unwanted)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
