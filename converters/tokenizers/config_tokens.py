"""Special tokens of tokenizer_config.json that tokenizer.json lacks, and the ids that readers give them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.errors import CheckpointError, UnsupportedError
from converters.json_file import read_json
from converters.names import TOKENIZER_CONFIG, TOKENIZER_JSON
from converters.tokenizers.tiktoken_model import BYTE_LETTERS
from converters.tokenizers.tokenizer_json import read_tokenizer_json

_ENDS = ("bos_token", "eos_token")
# In the order in which torchtitan v0.2.2 adds them, and transformers 5
_TORCHTITAN = (*_ENDS, "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_TRANSFORMERS = (*_ENDS, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokens_only_in_config(assets: Mapping[str, Path], id_of: Mapping[str, int], next_id: int) -> dict[str, int]:
    """Each such token and its id, in ascending order. Empty unless the begin or end token is among them.

    `id_of` and `next_id`: see `read_table`.

    The ids follow the table of tokenizer.json, as the `tokenizers` library assigns them in torchtitan and transformers.
    Both ignore the ids of `added_tokens_decoder`. Raises UnsupportedError where they would differ.
    """
    if TOKENIZER_CONFIG not in assets or not id_of:
        return {}
    config = read_json(assets[TOKENIZER_CONFIG])
    if all((text := token_text(config.get(key))) is None or text in id_of for key in _ENDS):
        return {}
    declared = declared_tokens(config)
    in_torchtitan = [*_named(config, _TORCHTITAN), *declared.values()]
    in_transformers = [*(declared[id] for id in sorted(declared)), *_named(config, _TRANSFORMERS)]
    added, others = (
        {text: next_id + i for i, text in enumerate(text for text in dict.fromkeys(order) if text not in id_of)}
        for order in (in_torchtitan, in_transformers)
    )
    if differing := [text for text, id in added.items() if others[text] != id]:
        raise UnsupportedError(
            f"{assets[TOKENIZER_CONFIG]} names tokens that {TOKENIZER_JSON} lacks, and torchtitan numbers"
            f" {', '.join(differing)} differently from transformers",
            hint="load the folder with transformers' AutoTokenizer and save it again: tokenizer.json then has the ids",
        )
    return added


def count_lacking(config: Mapping[str, Any], id_of: Mapping[str, int]) -> int:
    """How many tokens tokenizer_config.json names beyond `id_of`; transformers gives them the next ids."""
    return len({*declared_tokens(config).values(), *_named(config, _TRANSFORMERS)} - id_of.keys())


def tokenizer_notes(assets: Mapping[str, Path]) -> list[str]:
    """Notes on a tokenizer.json: ids of such tokens, and bytes of a text that have no token."""
    if TOKENIZER_JSON not in assets:
        return []
    path, notes = assets[TOKENIZER_JSON], []
    content, _ = read_tokenizer_json(path)
    if added := tokens_only_in_config(assets, *_table(content, path)):
        declared = {text: id for id, text in declared_tokens(read_json(assets[TOKENIZER_CONFIG])).items()}
        moved = [str(declared[text]) for text, id in added.items() if declared.get(text, id) != id]
        written = f" ({TOKENIZER_CONFIG} writes {', '.join(moved)})" if moved else ""
        notes.append(
            f"{path} lacks {', '.join(added)}, which {TOKENIZER_CONFIG} names: their ids are"
            f" {', '.join(map(str, added.values()))}, as in torchtitan and transformers{written}"
        )
    if dropped := _dropped_bytes(content):
        which = ", the space among them," if ord(" ") in dropped else ""
        notes.append(
            f"{path} has no token for {len(dropped)} of the 256 bytes{which} and none for unknown ones: they are"
            " dropped from each text, as in torchtitan and transformers"
        )
    return notes


def _dropped_bytes(content: Mapping[str, Any]) -> list[int]:
    """Bytes without a token, where text is split into bytes and there is no unknown token."""
    model, cut = content.get("model") or {}, content.get("pre_tokenizer") or {}
    kinds = {part.get("type") for part in [cut, *cut.get("pretokenizers", [])]}
    if model.get("type") != "BPE" or "ByteLevel" not in kinds or model.get("unk_token") is not None:
        return []
    return [byte for byte, letter in BYTE_LETTERS.items() if letter not in model["vocab"]]


def read_table(path: Path) -> tuple[dict[str, int], int]:
    """The id of each token of a tokenizer.json, added ones included, and the id of the next added one.

    In the `tokenizers` library that is the size of the model's table, or the id after the added tokens beyond it.
    """
    return _table(read_tokenizer_json(path)[0], path)


def _table(content: Mapping[str, Any], path: Path) -> tuple[dict[str, int], int]:
    try:
        vocab = content.get("model", {}).get("vocab") or {}
        # a Unigram model's are pairs with a score, in the order of their ids
        named = dict(vocab) if isinstance(vocab, dict) else {str(piece): id for id, (piece, _) in enumerate(vocab)}
        added = {str(token["content"]): token["id"] for token in content.get("added_tokens") or []}
        return named | added, max([len(vocab), *(id + 1 for id in added.values())])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a tokenizer.json: {type(error).__name__}: {error}") from None


def token_text(token: Any) -> str | None:
    """The text of a token of tokenizer_config.json, which is its text or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _named(config: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [text for key in keys if (text := token_text(config.get(key)))]


def declared_tokens(config: Mapping[str, Any]) -> dict[int, str]:
    """Tokens of `added_tokens_decoder` by id."""
    listed = config.get("added_tokens_decoder") or {}
    try:
        return {int(id): str(token["content"]) for id, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{TOKENIZER_CONFIG}: no readable added_tokens_decoder"
        raise CheckpointError(f"{what} ({type(error).__name__}: {error})") from None
