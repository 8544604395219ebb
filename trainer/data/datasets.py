"""Open the data that `training.dataset` and `validation.dataset` name; register a user's own kinds."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from converters.common.errors import ConfigError, DataError, UnsupportedError
from converters.common.extensions import check_call, check_name
from converters.tokenizers.tokenizer import load_tokenizer
from trainer.data.index import open_index, read_vocab_size
from trainer.data.kinds import C4, C4_VALIDATION, TEXT_KINDS, TOKENS, known_kinds
from trainer.data.samples import TokenSource, Weighted, document_offsets, refuse_no_held_out, refuse_no_source
from trainer.data.sources import JSON_LINES, PARQUET, TEXT, find_files, read_documents
from trainer.data.streamed_text import C4_ON_THE_HUB, StreamedText, find_stream, stream_c4
from trainer.data.text_index import Preparation, identity_of, index_text, refuse_no_tokenizer

_ENDINGS = {"c4_test": JSON_LINES, "jsonl": JSON_LINES, "text": TEXT, "parquet": PARQUET}
assert _ENDINGS.keys() == set(TEXT_KINDS)

_SPLITS = {C4: "train", C4_VALIDATION: "validation"}
_OPENERS: dict[str, Callable[[str], TokenSource]] = {TOKENS: open_index}
_TORCHTITANS_SAMPLE = Path("tests/assets/c4_test")  # relative to its repository, where its users start their runs
_BUILT_IN = (TOKENS, *TEXT_KINDS, C4, C4_VALIDATION)


def register_dataset(name: str, open_source: Callable[[str], TokenSource]) -> None:
    """Register a kind of data under a name; for a module in `experimental.custom_import`.

    `open_source(dataset_path)` is called on every rank and returns the tokens.
    """
    check_name("dataset", name, {*_BUILT_IN, *_OPENERS})
    check_call(open_source, ("dataset_path",), f"dataset {name!r}")
    if name not in known_kinds:
        known_kinds.append(name)
    _OPENERS[name] = open_source


def open_dataset(
    name: str,
    path: str | None,
    *,
    vocab_size: int,
    preparation: Preparation | None = None,
    most_tokens: int | None = None,
) -> TokenSource:
    """Open the data of a `dataset` and `dataset_path` pair for a model with `vocab_size` embedding rows.

    `preparation` makes an index of text; `most_tokens` limits a streamed text.
    """
    if not path and (path := _path_of(name, path)):
        assert preparation is not None, name
        preparation.say(f"dataset c4_test without dataset_path: reading {path}, as torchtitan does")
    if name in (C4, C4_VALIDATION):
        source = _open_beginning_of_c4(name, path, preparation, most_tokens)
    elif name not in _OPENERS and name not in TEXT_KINDS:
        raise UnsupportedError(
            f"dataset = {name!r}: there is no such kind of data; there is {', '.join(known_kinds)}",
            hint="a module named in experimental.custom_import can register more",
        )
    elif not path:
        raise _no_path(name)
    elif name in _OPENERS:
        source = _OPENERS[name](path)
        refuse_no_source(source, f"dataset {name!r}", made_by=_OPENERS[name])
    else:
        source = _open_text(name, path, preparation)
    refuse_large_vocabulary(source.vocab_size, vocab_size, path or name)
    return source


def check_dataset(
    name: str, path: str | None, *, split: str, vocab_size: int, tokenizer: Path, needs_offsets: bool = False
) -> str:
    """Raise as `open_dataset` does, without making an index or contacting the hub. Returns what was not checked.

    `needs_offsets`: samples are made by where documents begin.
    """
    path = _path_of(name, path)
    if name not in (C4, C4_VALIDATION) and (name not in TEXT_KINDS or not path):
        source = open_dataset(name, path, vocab_size=vocab_size)
        refuse_no_held_out(source, split)
        if needs_offsets:
            document_offsets(source, split)
        return ""
    refuse_no_tokenizer(name, tokenizer)
    refuse_large_vocabulary(load_tokenizer(tokenizer).vocab_size, vocab_size, str(tokenizer))
    if name in TEXT_KINDS:
        assert path, name
        _text_files(name, path)
        return ""
    files = find_stream(_SPLITS[name], path)
    return "" if files else f"dataset = {name!r} is on the hub, which was not contacted"


def open_mixture(
    name: str, mix: Sequence[tuple[str, float]], *, vocab_size: int, preparation: Preparation | None = None
) -> list[Weighted]:
    """Open several sources of one kind. Raises DataError if they were made with different tokenizers."""
    opened = [
        Weighted(path, open_dataset(name, path, vocab_size=vocab_size, preparation=preparation), weight)
        for path, weight in mix
    ]
    first = next((part for part in opened if _tokenizer_of(part.source)), opened[0])
    digests = {part.name: _tokenizer_of(part.source) for part in opened}
    differing = [name for name, digest in digests.items() if digest and not digest & digests[first.name]]
    if differing:
        raise DataError(
            f"{first.name} and {', '.join(differing)} were made with different tokenizers: ids would be ambiguous",
            tries=[f"titan data prepare … --tokenizer {first.name}"],
        )
    return opened


def refuse_large_vocabulary(data_vocab: int, model_vocab: int, where: str) -> None:
    if data_vocab > model_vocab:
        raise DataError(
            f"{where}: token ids go up to {data_vocab - 1}, but the model has {model_vocab} embedding rows",
            hint="prepare the data with a vocabulary that fits, or train a larger flavor",
            tries=[f"titan data prepare … --vocab-size {model_vocab}"],
        )


def _path_of(name: str, path: str | None) -> str | None:
    """`path`; without one, the folder of torchtitan's sample of C4, if it exists."""
    return str(_TORCHTITANS_SAMPLE) if name == "c4_test" and not path and _TORCHTITANS_SAMPLE.is_dir() else path


def _open_text(name: str, path: str, preparation: Preparation | None) -> TokenSource:
    assert preparation is not None, name
    files = _text_files(name, path)
    return index_text(f"dataset {name}, {path}", lambda: identity_of(files), lambda: read_documents(files), preparation)


def _text_files(name: str, path: str) -> list[Path]:
    with suppress(DataError):  # not an index
        read_vocab_size(Path(path))
        raise ConfigError(
            f"dataset = {name!r}: {path} is a token index of `titan data prepare`, not text",
            hint=f'an index is read with dataset = "{TOKENS}"',
        )
    return find_files([Path(path)], kinds=_ENDINGS[name])


def _open_beginning_of_c4(
    name: str, path: str | None, preparation: Preparation | None, most_tokens: int | None
) -> TokenSource:
    """The beginning of a stream as an index, so that validation always reads the same tokens."""
    assert preparation is not None, name
    if name == C4 and most_tokens is None:
        raise DataError(
            "dataset = 'c4' is too long to validate on as a whole", tries=["--validation.steps 100", C4_VALIDATION]
        )
    split = _SPLITS[name]

    @cache
    def text() -> StreamedText:  # opened only on the rank that makes the index
        return stream_c4(split, path)

    return index_text(
        f"dataset {name}, {path or 'from the hub'}",
        lambda: text().identity if path else [*C4_ON_THE_HUB, split],
        lambda: text().documents(),
        preparation,
        most_tokens=most_tokens,
    )


def _tokenizer_of(source: TokenSource) -> frozenset[str]:
    """Digests of an index's tokenizer; empty for data without one, such as a user's own."""
    return getattr(source, "tokenizer_digests", frozenset())


def _no_path(name: str) -> DataError:
    if name == "c4_test":
        return DataError(
            "dataset = 'c4_test' needs dataset_path: a file or folder in C4's format (JSON lines with a \"text\" each)",
            hint=f"torchtitan's small sample of C4 is not part of titan, and there is no {_TORCHTITANS_SAMPLE} here;"
            " Python's own sources work as a first text",
            tries=["--training.dataset_path c4-train.00000-of-01024.json.gz", "titan data prepare --out data"],
        )
    return DataError(f"dataset = {name!r} needs dataset_path", tries=["--training.dataset_path data"])
