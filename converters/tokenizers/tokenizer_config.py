"""tokenizer_config.json beside a tokenizer.json that was made here."""

from collections.abc import Mapping
from pathlib import Path

from converters.json_file import write_json
from converters.names import TOKENIZER_CONFIG


def write_tokenizer_config(folder: Path, tokens: Mapping[str, str], *, max_seq_len: int) -> list[str]:
    """`tokens`: bos_token, eos_token … Returns the names written: none where the checkpoint brought its own file."""
    if (folder / TOKENIZER_CONFIG).exists():  # it may hold the chat template
        return []
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        **tokens,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_seq_len,
    }
    write_json(folder / TOKENIZER_CONFIG, config)
    return [TOKENIZER_CONFIG]
