"""The checkpoint's own tokenizer and stop tokens, checked against the rows of its embedding."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, DataError
from converters.common.names import HF_CONFIG, HF_GENERATION_CONFIG
from converters.model.model_info import ModelInfo
from converters.store.json_file import read_json
from converters.tokenizers.assets import find_assets, read_token_ids
from converters.tokenizers.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer, and the ids and texts that end a generation."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    byte_values: Mapping[int, int] = field(default_factory=dict)  # of the tokenizer's byte tokens
    begin: tuple[int, ...] = ()  # the tokens of an empty prompt; none where no config names a begin-of-text token

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that transformers' tokenizer adds before a text."""
        return self.tokenizer.prefix_ids

    @property
    def suffix(self) -> tuple[int, ...]:
        """The tokens that transformers' tokenizer adds behind a text."""
        return self.tokenizer.suffix_ids

    def framed(self, tokens: list[int]) -> list[int]:
        """The tokens of a prompt of these tokens, as transformers' tokenizer frames them.

        Raises DataError for a token that the model has no row for.
        """
        return self.tokenizer.checked([*self.prefix, *tokens, *self.suffix])

    def decode(self, tokens: list[int]) -> str:
        """Text of generated tokens, special ones included.

        An embedding may have more rows than the tokenizer has tokens: an unknown id becomes U+FFFD.
        """
        try:
            return self.tokenizer.decode(tokens)
        except DataError:
            runs = [(is_known, list(run)) for is_known, run in groupby(tokens, key=self._is_known)]
        return "".join(self.tokenizer.decode(run) if is_known else "\ufffd" * len(run) for is_known, run in runs)

    def _is_known(self, token: int) -> bool:
        try:
            self.tokenizer.decode([token])
        except DataError:
            return False
        return True


def read_vocabulary(folder: Path, info: ModelInfo) -> Vocabulary:
    """The vocabulary in `folder`; the generation config is the checkpoint's, if it has one.

    Raises CheckpointError if the tokenizer is missing or has more tokens than the embedding has rows, but for added
    ones: those are refused in a text.
    """
    num_rows = info.decoder.vocab_size
    tokenizer = load_tokenizer(folder, num_rows=num_rows)
    if tokenizer.base_size > num_rows:
        raise CheckpointError(
            f"the tokenizer in {folder} has {tokenizer.base_size} tokens, the model's embedding {num_rows} rows",
            hint="this tokenizer belongs to another model",
        )
    generation = {name: path for name, path in info.assets.items() if name == HF_GENERATION_CONFIG}
    assets = find_assets(folder) | generation
    config = read_json(folder / HF_CONFIG) if (folder / HF_CONFIG).is_file() else {}
    named_ids = {**info.token_ids, **{key: value for key, value in config.items() if value is not None}}
    ids = read_token_ids(assets, vocab_size=num_rows, config=named_ids)
    bos, stop_ids = (_ids(ids, key, folder) for key in ("bos_token_id", "eos_token_id"))
    if wrong := sorted(
        i for i in {*tokenizer.prefix_ids, *tokenizer.suffix_ids, *bos, *stop_ids} if not 0 <= i < num_rows
    ):
        raise CheckpointError(
            f"special token ids {wrong} in {folder} exceed the {num_rows} rows of the model's embedding",
            hint="the tokenizer or the generation config belongs to another model",
        )
    begin = tokenizer.prefix_ids or tuple(bos[:1])
    return Vocabulary(tokenizer, frozenset(stop_ids), _stop_strings(assets), tokenizer.byte_values, begin)


def _ids(named: Mapping[str, Any], key: str, folder: Path) -> list[int]:
    found = named.get(key, [])
    ids: list[Any] = found if isinstance(found, list) else [found]
    if wrong := [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]:
        what = "stop tokens" if key == "eos_token_id" else "begin-of-text token"
        raise CheckpointError(f"the {what} of {folder} must be token ids, not {wrong}")
    return ids


def _stop_strings(assets: Mapping[str, Path]) -> tuple[str, ...]:
    path = assets.get(HF_GENERATION_CONFIG)
    found = None if path is None else read_json(path).get("stop_strings")
    strings = [] if found is None else [found] if isinstance(found, str) else found
    if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
        raise CheckpointError(f"{path}: stop_strings is {found!r:.200}; it must be text or a list of texts, none empty")
    return tuple(strings)
