"""Read tokenizer.json in little memory, and write the tokenizer_config.json of a converted one."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from converters.common.names import TOKENIZER_CONFIG
from converters.store.json_file import read_json, write_json
from converters.store.local_files import is_file, read_bytes

_TEXT = rb'"(?:[^"\\]|\\.)*+"'
_MERGE = rb"(?:%b|\[\s*%b\s*,\s*%b\s*\])" % (_TEXT, _TEXT, _TEXT)  # "a b" before tokenizers 0.20, then ["a", "b"]
_MERGES = re.compile(rb'"merges"\s*:\s*\[\s*((?:%b(?:\s*,\s*%b)*+)?+)\s*\]' % (_MERGE, _MERGE))


def read_tokenizer_json(path: Path) -> tuple[dict[str, Any], Iterable[Any]]:
    """The content without `model.merges`, and the merges. Raises CheckpointError if the file is not a JSON object.

    Half a million Python strings for a Llama 3 would need more memory than the rest of a conversion.
    """
    raw = read_bytes(path) if is_file(path) else b""
    if match := _MERGES.search(raw):
        start, end = match.span(1)
        try:
            content = json.loads(raw[:start] + raw[end:])
            if content["model"]["merges"] == []:
                return content, (json.loads(merge.group()) for merge in re.compile(_MERGE).finditer(raw, start, end))
        except (ValueError, RecursionError, TypeError, KeyError):
            pass  # reported below
    content = read_json(path)  # in another form, or damaged
    model = content.get("model")
    return content, model.pop("merges", []) if isinstance(model, dict) else []


def write_tokenizer_config(folder: Path, tokens: Mapping[str, str], *, max_seq_len: int) -> list[str]:
    """`tokens`: bos_token, eos_token … Returns the names written: none if the checkpoint has its own file."""
    if is_file(folder / TOKENIZER_CONFIG):  # it may hold the chat template
        return []
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads only tokenizer.json
        **tokens,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_seq_len,
    }
    write_json(folder / TOKENIZER_CONFIG, config)
    return [TOKENIZER_CONFIG]
