"""The checkpoint's own tokenizer and stop tokens, checked against the rows of its embedding."""

from dataclasses import dataclass
from pathlib import Path

from converters.assets import read_token_ids
from converters.errors import CheckpointError, TitanError
from converters.json_file import read_json
from converters.model_info import ModelInfo
from converters.names import HF_CONFIG
from trainer.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How text becomes ids and back, and the ids that end a generation."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()

    def decode(self, tokens: list[int]) -> str:
        """Text of generated tokens.

        An embedding may have more rows than the tokenizer has tokens: an id it does not know shows as U+FFFD.
        """
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
        except TitanError:
            return False
        return True


def read_vocabulary(folder: Path, info: ModelInfo) -> Vocabulary:
    """The vocabulary in a checkpoint's folder. Raises where it is missing or goes beyond the embedding's rows."""
    tokenizer, num_rows = load_tokenizer(folder), info.args.vocab_size
    if tokenizer.vocab_size > num_rows:
        raise CheckpointError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, the model's embedding {num_rows} rows",
            hint="this tokenizer belongs to another model",
        )
    stop_ids = _stop_ids(folder, info, tokenizer)
    special = {tokenizer.bos_id, *stop_ids} - {None}
    if wrong := sorted(i for i in special if not 0 <= i < num_rows):
        raise CheckpointError(
            f"special token ids {wrong} in {folder} lie beyond the {num_rows} rows of the model's embedding",
            hint="the tokenizer or the generation config belongs to another model",
        )
    return Vocabulary(tokenizer, frozenset(stop_ids))


def _stop_ids(folder: Path, info: ModelInfo, tokenizer: Tokenizer) -> list[int]:
    """The generation config's (or what the tokenizer files name), else config.json's, else the tokenizer's own."""
    found = read_token_ids(info.assets, vocab_size=info.args.vocab_size).get("eos_token_id")
    if found is None and (folder / HF_CONFIG).is_file():
        found = read_json(folder / HF_CONFIG).get("eos_token_id")
    if found is None:
        found = list(tokenizer.eos_ids)
    ids = found if isinstance(found, list) else [found]
    if wrong := [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]:
        raise CheckpointError(f"the stop tokens of {folder} must be token ids, not {wrong}")
    return ids
