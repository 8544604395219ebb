"""Notes on a tokenizer.json: the ids of tokens that other files declare, and bytes of a text that have no token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.common.names import TOKENIZER_JSON
from converters.tokenizers.tiktoken_model import BYTE_LETTERS
from converters.tokenizers.tokenizer_json import read_tokenizer_json

_MOST = 8  # that are named


def tokenizer_notes(assets: Mapping[str, Path]) -> list[str]:
    """Notes on what may be unexpected of a tokenizer.json; empty for another kind. Raises as read_folder_tokenizer."""
    from converters.tokenizers.reader import read_folder_tokenizer

    if TOKENIZER_JSON not in assets:
        return []
    path, notes = assets[TOKENIZER_JSON], []
    content, _ = read_tokenizer_json(path)
    vocab = content["model"]["vocab"]
    texts = {*(vocab if isinstance(vocab, dict) else (piece for piece, _ in vocab))}
    texts |= {token["content"] for token in content["added_tokens"]}
    added_tokens = read_folder_tokenizer(assets, with_merges=False).tokenizer.get_added_tokens_decoder()
    if added := [f"{token.content} {id}" for id, token in sorted(added_tokens.items()) if token.content not in texts]:
        more = f" and {len(added) - _MOST} more" if len(added) > _MOST else ""
        notes.append(
            f"{path} lacks tokens that the files beside it declare; their ids, as in transformers:"
            f" {', '.join(added[:_MOST])}{more}"
        )
    if dropped := _dropped_bytes(content):
        which = ", the space among them," if ord(" ") in dropped else ""
        notes.append(
            f"{path} has no token for {len(dropped)} of the 256 bytes{which} and none for unknown ones: they are"
            " dropped from each text, as in torchtitan and transformers"
        )
    return notes


def _dropped_bytes(content: Mapping[str, Any]) -> list[int]:
    """Bytes without a token, if text is split into bytes and there is no unknown token."""
    model, cut = content.get("model") or {}, content.get("pre_tokenizer") or {}
    kinds = {part.get("type") for part in [cut, *cut.get("pretokenizers", [])]}
    if model.get("type") != "BPE" or "ByteLevel" not in kinds or model.get("unk_token") is not None:
        return []
    return [byte for byte, letter in BYTE_LETTERS.items() if letter not in model["vocab"]]
