"""The special tokens around a training document, and before a prompt.

The rules differ on purpose. A document is between a begin and an end token if the tokenizer has them, as in torchtitan.
A prompt begins as in transformers: a tokenizer may have a begin-of-text token that it does not add to texts
(SmolLM2's), and so may a generation config (Qwen 3's).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.assets import TOKEN_IDS, read_token_ids
from converters.errors import DataError
from converters.json_file import read_json
from converters.names import HF_GENERATION_CONFIG, TOKENIZER_CONFIG


def document_ends(assets: Mapping[str, Path], vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """The ids that documents begin with (None where there is none) and end with, the first of them.

    A generation config that names any id hides what the tokenizer names. So it stays: documents of runs that are
    resumed were made of it.
    """
    generation = read_json(assets[HF_GENERATION_CONFIG]) if HF_GENERATION_CONFIG in assets else {}
    ids = {key: generation[key] for key in TOKEN_IDS if generation.get(key) is not None}
    ids = ids or read_token_ids(assets, vocab_size=vocab_size)
    eos = ids.get("eos_token_id", [])
    bos = None if _says_no_bos(assets) else ids.get("bos_token_id")
    return bos, tuple(eos if isinstance(eos, list) else [eos])


def prefix_of_post_processor(found: Any) -> tuple[int, ...]:
    """The ids that a tokenizer.json's post_processor, as JSON or as the library's own, puts before a text.

    It alone decides: transformers 5 ignores add_bos_token with a tokenizer.json, and 4 wrote both consistently. What it
    appends to a text (add_eos_token) is omitted from prompts. Raises DataError where it is invalid.
    """
    if found is None:
        return ()
    from tokenizers import Tokenizer

    described = json.loads(found.__getstate__()) if not isinstance(found, dict) else found
    # Ask the library, with a vocabulary of one word, which loads quickly
    frame: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "decoder": None,
    }
    word = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    try:
        tokenizer = Tokenizer.from_str(json.dumps(frame | {"post_processor": described, "model": word}))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"the tokenizer's post_processor cannot be read: {error}") from None
    text = tokenizer.encode("a")
    return tuple(text.ids[: text.special_tokens_mask.index(0)])


def prefix_of_model_file(assets: Mapping[str, Path], bos_id: int | None) -> tuple[int, ...]:
    """The ids before a text where a tokenizer.model comes alone: begin-of-text, as in Meta's code and transformers 4.

    Unless a tokenizer_config.json says add_bos_token: false, or that there is no such token.
    """
    return () if bos_id is None or _says_no_bos(assets) else (bos_id,)


def is_legacy(assets: Mapping[str, Path]) -> bool:
    """Whether a SentencePiece model adds a space after a special token too, as Meta's code does.

    Not where a tokenizer_config.json says legacy: false.
    """
    return _tokenizer_config(assets).get("legacy") is not False


def _says_no_bos(assets: Mapping[str, Path]) -> bool:
    """Qwen's tokenizer begins no text with a token, though its generation config names one."""
    config = _tokenizer_config(assets)
    return config.get("add_bos_token") is False or ("bos_token" in config and config["bos_token"] is None)


def _tokenizer_config(assets: Mapping[str, Path]) -> dict[str, Any]:
    return read_json(assets[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in assets else {}
