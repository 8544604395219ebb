"""The files that travel with weights: tokenizer, chat template, generation config; and the token ids they name."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.errors import UnsupportedError
from converters.json_file import read_json, write_json
from converters.names import ASSETS_FOLDER, HF_GENERATION_CONFIG, TIKTOKEN_MODEL, TOKENIZER_CONFIG, TOKENIZER_JSON
from converters.tokenizers.config_tokens import read_table, token_text, tokens_only_in_config
from converters.tokenizers.sentencepiece_model import (
    read_sentencepiece,
    require_exact,
    write_tokenizer_of_sentencepiece,
)
from converters.tokenizers.tiktoken_from_json import ranks_of_tokenizer_json, write_ranks
from converters.tokenizers.tiktoken_model import (
    looks_like_tiktoken,
    read_ranks,
    special_tokens_after,
    write_hf_tokenizer,
)

CARRIED = (
    TOKENIZER_JSON,
    TIKTOKEN_MODEL,
    TOKENIZER_CONFIG,
    HF_GENERATION_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",  # these two: what Qwen's slow tokenizers open
    "merges.txt",
)
CHAT_TEMPLATES = "additional_chat_templates"  # transformers' folder for those beside the default one
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CLASS_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2}  # of transformers' LlamaConfig
# Llama 3's ends of text, message and turn. A Meta release does not say whether it is base or Instruct, so all of them
# end a generation: a base model never says the last two.
_LLAMA3_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")


def find_assets(folder: Path) -> dict[str, Path]:
    """Carried files of a checkpoint by name: in its folder, in assets/ (DCP), or in original/ (HF's Llama repos)."""
    found = {}
    for place in (folder, folder / ASSETS_FOLDER, folder / "original"):
        further = sorted(f"{CHAT_TEMPLATES}/{path.name}" for path in (place / CHAT_TEMPLATES).glob("*.jinja"))
        for name in (*CARRIED, *further):
            if name not in found and (place / name).is_file():
                found[name] = place / name
    return found


def read_token_ids(
    assets: Mapping[str, Path], *, vocab_size: int, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """bos, eos and pad ids, each by itself: the generation config's, else config.json's, else what the tokenizer names.

    So transformers' `generate` takes them, but for two things. Where a generation config leaves one out, so that
    `generate` has none, the tokenizer is asked before config.json. And 1 and 2 in a config.json are its class's
    defaults where nobody set ids: the tokenizer knows better.
    """
    told = _ids_in(config or {})
    if HF_GENERATION_CONFIG in assets:
        sure = _ids_in(read_json(assets[HF_GENERATION_CONFIG]))
    else:
        sure = {key: id for key, id in told.items() if id != _CLASS_DEFAULTS.get(key)}
    # A tokenizer takes its time to read, and a pad id alone is not worth it
    named = {} if _CLASS_DEFAULTS.keys() <= sure.keys() else _ids_named_by_tokenizer(assets, vocab_size)
    return told | named | sure


def _ids_in(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}


def _ids_named_by_tokenizer(assets: Mapping[str, Path], vocab_size: int) -> dict[str, Any]:
    if TOKENIZER_JSON in assets and TOKENIZER_CONFIG in assets:
        id_of, next_id = read_table(assets[TOKENIZER_JSON])
        id_of = id_of | tokens_only_in_config(assets, id_of, next_id)
        config = read_json(assets[TOKENIZER_CONFIG])
        named = {key: token_text(config.get(key.removesuffix("_id"))) for key in TOKEN_IDS}
        return {key: id_of[text] for key, text in named.items() if text in id_of}
    if TIKTOKEN_MODEL in assets and looks_like_tiktoken(assets[TIKTOKEN_MODEL]):
        num_ranks = len(read_ranks(assets[TIKTOKEN_MODEL]))
        id_of = {token: num_ranks + i for i, token in enumerate(special_tokens_after(num_ranks, vocab_size=vocab_size))}
        ends = [id_of[token] for token in _LLAMA3_ENDS if token in id_of]
        return {"bos_token_id": id_of["<|begin_of_text|>"], "eos_token_id": ends} if ends else {}
    if TIKTOKEN_MODEL in assets and (model := read_sentencepiece(assets[TIKTOKEN_MODEL])):
        return model.token_ids()
    return {}


def write_assets(folder: Path, assets: Mapping[str, Path], token_ids: Mapping[str, Any]) -> list[str]:
    """Copy the carried files into `folder` and make a generation config where there is none. Returns the names."""
    if not assets and not token_ids:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in assets.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    written = list(assets)
    if token_ids and HF_GENERATION_CONFIG not in assets:
        write_json(folder / HF_GENERATION_CONFIG, dict(token_ids))
        written.append(HF_GENERATION_CONFIG)
    return written


def write_tokenizer_for_hf(folder: Path, assets: Mapping[str, Path], *, vocab_size: int, max_seq_len: int) -> list[str]:
    """tokenizer.json and tokenizer_config.json beside a lone tokenizer.model, which transformers cannot open alone.

    Nothing where there is a tokenizer.json, or none is exact. Returns the names written.
    """
    path = assets.get(TIKTOKEN_MODEL)
    if TOKENIZER_JSON in assets or path is None:
        return []
    if looks_like_tiktoken(path):
        return write_hf_tokenizer(folder, path, vocab_size=vocab_size, max_seq_len=max_seq_len)
    try:
        model = read_sentencepiece(path)
        return write_tokenizer_of_sentencepiece(folder, model, max_seq_len=max_seq_len) if model else []
    except UnsupportedError:  # the tokenizer.model is carried as it is; tokenizer_remark tells
        return []


def write_tokenizer_for_meta(folder: Path, assets: Mapping[str, Path], *, vocab_size: int) -> list[str]:
    """tokenizer.model (tiktoken) beside a lone tokenizer.json, which Meta's code cannot open, where one is exact."""
    if TIKTOKEN_MODEL in assets or TOKENIZER_JSON not in assets:
        return []
    try:
        ranks = ranks_of_tokenizer_json(assets[TOKENIZER_JSON], vocab_size=vocab_size)
    except UnsupportedError:
        return []
    write_ranks(folder / TIKTOKEN_MODEL, ranks)
    return [TIKTOKEN_MODEL]


def tokenizer_remark(assets: Mapping[str, Path], *, to: str, vocab_size: int) -> str:
    """What the readers of format `to` will miss in the tokenizer that was carried along; empty if nothing."""
    path = assets.get(TIKTOKEN_MODEL)
    try:
        if to == "meta" and path is None and TOKENIZER_JSON in assets:
            ranks_of_tokenizer_json(assets[TOKENIZER_JSON], vocab_size=vocab_size)
        elif to == "hf" and path is not None and TOKENIZER_JSON not in assets and not looks_like_tiktoken(path):
            if (model := read_sentencepiece(path)) is None:
                return f"{TIKTOKEN_MODEL} is carried along unread: it is neither tiktoken nor SentencePiece"
            require_exact(model)
    except UnsupportedError as error:
        carried, wanted = (TOKENIZER_JSON, "Meta's code") if to == "meta" else (TIKTOKEN_MODEL, "transformers")
        return f"{carried} is carried along untranslated, {wanted} may not open it: {error.message}"
    return ""
