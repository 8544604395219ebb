"""The checkpoint's own tokenizer and stop tokens, checked against the rows of its embedding."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from converters.assets import find_assets, read_token_ids
from converters.errors import CheckpointError, DataError
from converters.json_file import read_json
from converters.model_info import ModelInfo
from converters.names import HF_CONFIG, HF_GENERATION_CONFIG
from trainer.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How text becomes ids and back, and the ids and texts that end a generation."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    byte_values: Mapping[int, int] = field(default_factory=dict)  # the tokenizer's

    def decode(self, tokens: list[int]) -> str:
        """Text of generated tokens, special ones included.

        An embedding may have more rows than the tokenizer has tokens: an id it does not know shows as U+FFFD.
        """
        try:
            return self.tokenizer.decode(tokens)
        except DataError:
            known = {token: self._is_known(token) for token in set(tokens)}
        parts, run = [], []
        for token in tokens:
            if known[token]:
                run.append(token)
            else:
                parts += [self.tokenizer.decode(run), "\ufffd"]
                run = []
        return "".join([*parts, self.tokenizer.decode(run)])

    def _is_known(self, token: int) -> bool:
        try:
            self.tokenizer.decode([token])
        except DataError:
            return False
        return True


def read_vocabulary(folder: Path, info: ModelInfo) -> Vocabulary:
    """The vocabulary in `folder`; a generation config that is not there is the checkpoint's.

    Raises where the tokenizer is missing or goes beyond the embedding's rows.
    """
    tokenizer, num_rows = load_tokenizer(folder), info.args.vocab_size
    if tokenizer.vocab_size > num_rows:
        raise CheckpointError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, the model's embedding {num_rows} rows",
            hint="this tokenizer belongs to another model",
        )
    generation = {name: path for name, path in info.assets.items() if name == HF_GENERATION_CONFIG}
    assets = generation | find_assets(folder)
    stop_ids = _stop_ids(assets, folder, info)
    special = {tokenizer.bos_id, *stop_ids} - {None}
    if wrong := sorted(i for i in special if not 0 <= i < num_rows):
        raise CheckpointError(
            f"special token ids {wrong} in {folder} lie beyond the {num_rows} rows of the model's embedding",
            hint="the tokenizer or the generation config belongs to another model",
        )
    return Vocabulary(tokenizer, frozenset(stop_ids), _stop_strings(assets), tokenizer.byte_values)


def _stop_ids(assets: Mapping[str, Path], folder: Path, info: ModelInfo) -> list[int]:
    """The generation config's, else what the tokenizer names, else config.json's (which holds defaults nobody set)."""
    named = {name: path for name, path in assets.items() if name != HF_GENERATION_CONFIG}
    found = None
    for told_by in (assets, named):  # a generation config may name other ids alone
        if found is None:
            found = read_token_ids(told_by, vocab_size=info.args.vocab_size).get("eos_token_id")
    if found is None and (folder / HF_CONFIG).is_file():
        found = read_json(folder / HF_CONFIG).get("eos_token_id")
    if found is None:
        found = info.token_ids.get("eos_token_id", [])
    ids = found if isinstance(found, list) else [found]
    if wrong := [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]:
        raise CheckpointError(f"the stop tokens of {folder} must be token ids, not {wrong}")
    return ids


def _stop_strings(assets: Mapping[str, Path]) -> tuple[str, ...]:
    path = assets.get(HF_GENERATION_CONFIG)
    found = None if path is None else read_json(path).get("stop_strings")
    strings = [] if found is None else [found] if isinstance(found, str) else found
    if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
        raise CheckpointError(f"{path}: stop_strings is {found!r:.200}; it must be text or a list of texts, none empty")
    return tuple(strings)
