"""The files that are copied along with weights: tokenizer, chat template, generation config; and their token ids."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from converters.containers.paths import refuse_links_out
from converters.errors import CheckpointError, UnsupportedError
from converters.json_file import read_json, write_json
from converters.names import (
    ASSETS_FOLDER,
    HF_GENERATION_CONFIG,
    MOONSHOT_RANKS,
    TIKTOKEN_MODEL,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
)
from converters.tokenizers import moonshot
from converters.tokenizers.agreement import disagreement
from converters.tokenizers.config_tokens import count_lacking, read_table, token_text, tokens_only_in_config
from converters.tokenizers.sentencepiece_model import (
    read_sentencepiece,
    require_exact,
    write_tokenizer_of_sentencepiece,
)
from converters.tokenizers.tiktoken_from_json import ranks_of_tokenizer_json, write_ranks
from converters.tokenizers.tiktoken_model import (
    BEGIN,
    is_of_llama,
    looks_like_tiktoken,
    read_ranks,
    require_of_llama,
    special_tokens_after,
    write_hf_tokenizer,
)

CARRIED = (
    TOKENIZER_JSON,
    TIKTOKEN_MODEL,
    MOONSHOT_RANKS,
    TOKENIZER_CONFIG,
    HF_GENERATION_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",  # this and the next are for Qwen's slow tokenizers
    "merges.txt",
)
# The licence, which must accompany a copy of the model, and the model card
_DOCUMENT = re.compile(
    r"(?i)((readme|licen[cs]e|notice|copying|(acceptable_)?use_policy)([ ._-].*)?(?<!\.py)(?<!\.json)|.+\.md)"
)
_MOST_OF_DOCUMENT = 16 << 20  # bytes
_WEIGHTS = re.compile(r"\.metadata|.*\.safetensors|consolidated\.\d+\.pth|(pytorch_)?model(-\d.*)?\.(bin|pt|pth)")
TOKENIZERS = (TOKENIZER_JSON, TIKTOKEN_MODEL, MOONSHOT_RANKS)
CHAT_TEMPLATES = "additional_chat_templates"  # transformers' folder for all but the default one
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CLASS_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2}  # of transformers' LlamaConfig
# Llama 3's and 4's ends of text, message and turn. A Meta release does not say whether it is base or Instruct, so all
# of them end a generation: a base model generates only the first.
_LLAMA_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>")


_READERS = {"meta": "Meta's code", "torchtune": "torchtune"}


def find_assets(folder: Path) -> dict[str, Path]:
    """Carried files of a checkpoint by name: in its folder, in assets/ (DCP), or in original/ (HF's Llama repos)."""
    found = {}
    for place in (folder, folder / ASSETS_FOLDER, folder / "original"):
        further = sorted(f"{CHAT_TEMPLATES}/{path.name}" for path in (place / CHAT_TEMPLATES).glob("*.jinja"))
        for name in (*CARRIED, *further):
            if name not in found and (place / name).is_file():
                found[name] = place / name
    return found


def find_documents(folder: Path) -> dict[str, Path]:
    """Licence and model card of the weights in a folder, by name; none where the folder has no weights.

    A project's own README.md in a folder that has only a config or a tokenizer is not the model's.
    """
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if not any(_WEIGHTS.fullmatch(name) for name in names):
        return {}
    found = {}
    for place in (folder, folder / ASSETS_FOLDER):
        for path in sorted(place.iterdir()) if place.is_dir() else []:
            if path.name not in found and _is_document(folder, path):
                found[path.name] = path
    return found


def _is_document(folder: Path, path: Path) -> bool:
    if not (path.name.isprintable() and _DOCUMENT.fullmatch(path.name) and path.is_file()):
        return False
    if path.stat().st_size > _MOST_OF_DOCUMENT:
        return False
    try:
        refuse_links_out(folder, [path])
    except CheckpointError:  # unreadable: the report lists it among the files that are not copied
        return False
    return True


def read_token_ids(
    assets: Mapping[str, Path], *, vocab_size: int, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """bos, eos and pad ids, each from the generation config, else config.json, else the tokenizer.

    This is the order of transformers' `generate`, with two exceptions. An id that a generation config leaves out, so
    that `generate` has none, comes from the tokenizer before config.json. And 1 and 2 in a config.json may be the
    defaults of its class: the tokenizer takes precedence.
    """
    stated = _ids_in(config or {})
    if HF_GENERATION_CONFIG in assets:
        sure = _ids_in(read_json(assets[HF_GENERATION_CONFIG]))
    else:
        sure = {key: id for key, id in stated.items() if id != CLASS_DEFAULTS.get(key)}
    # Reading a tokenizer is slow, too slow for a pad id alone
    named = {} if CLASS_DEFAULTS.keys() <= sure.keys() else _ids_named_by_tokenizer(assets, vocab_size)
    return stated | named | sure


def read_carried_ids(assets: Mapping[str, Path], token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """The token ids in the generation config that is copied: the source's, else one of `token_ids`."""
    return _ids_in(read_json(assets[HF_GENERATION_CONFIG])) if HF_GENERATION_CONFIG in assets else dict(token_ids)


def _ids_in(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}


def _ids_named_by_tokenizer(assets: Mapping[str, Path], vocab_size: int) -> dict[str, Any]:
    if TOKENIZER_JSON in assets and TOKENIZER_CONFIG in assets:
        return dict(_read_ids(*_versions(assets)).named)
    if TIKTOKEN_MODEL in assets and looks_like_tiktoken(assets[TIKTOKEN_MODEL]):
        if TOKENIZER_JSON in assets:
            id_of, _ = read_table(assets[TOKENIZER_JSON])
        else:
            if not is_of_llama(num_ranks := len(read_ranks(assets[TIKTOKEN_MODEL]))):
                return {}
            special = special_tokens_after(num_ranks, vocab_size=vocab_size)
            id_of = {token: num_ranks + i for i, token in enumerate(special)}
        ends = [id_of[token] for token in _LLAMA_ENDS if token in id_of]
        return {"bos_token_id": id_of[BEGIN], "eos_token_id": ends} if ends and BEGIN in id_of else {}
    if TIKTOKEN_MODEL in assets and (model := read_sentencepiece(assets[TIKTOKEN_MODEL])):
        return model.token_ids()
    if MOONSHOT_RANKS in assets and TOKENIZER_JSON not in assets and TIKTOKEN_MODEL not in assets:
        return dict(moonshot.named_ids(assets, TOKEN_IDS))
    return {}


def write_assets(folder: Path, assets: Mapping[str, Path], generation: Mapping[str, Any]) -> list[str]:
    """Copy the carried files into `folder`, and make a generation config of `generation` where there is none.

    Returns the names.
    """
    if not assets and not generation:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in assets.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    written = list(assets)
    if generation and HF_GENERATION_CONFIG not in assets:
        write_json(folder / HF_GENERATION_CONFIG, dict(generation))
        written.append(HF_GENERATION_CONFIG)
    return written


def write_tokenizer_for_hf(folder: Path, assets: Mapping[str, Path], *, vocab_size: int, max_seq_len: int) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json for a tokenizer.model, which transformers cannot open alone.

    Writes nothing where there is a tokenizer.json, or where none would be exact. Returns the names written.
    """
    path = assets.get(TIKTOKEN_MODEL)
    if TOKENIZER_JSON in assets or path is None:
        return []
    try:
        if looks_like_tiktoken(path):
            return write_hf_tokenizer(folder, path, vocab_size=vocab_size, max_seq_len=max_seq_len)
        model = read_sentencepiece(path)
        return write_tokenizer_of_sentencepiece(folder, model, max_seq_len=max_seq_len) if model else []
    except (CheckpointError, UnsupportedError):  # tokenizer.model is copied unchanged; a remark of the report says why
        return []


def write_tokenizer_for_meta(folder: Path, assets: Mapping[str, Path], *, vocab_size: int) -> list[str]:
    """Write tokenizer.model (tiktoken) for a tokenizer.json, which Meta's code cannot open, where it is exact."""
    if TIKTOKEN_MODEL in assets or TOKENIZER_JSON not in assets:
        return []
    try:
        ranks = ranks_of_tokenizer_json(assets[TOKENIZER_JSON], vocab_size=vocab_size)
    except (CheckpointError, UnsupportedError):
        return []
    write_ranks(folder / TIKTOKEN_MODEL, ranks)
    return [TIKTOKEN_MODEL]


def tokenizer_remark(assets: Mapping[str, Path], *, to: str, vocab_size: int, of_meta: bool = False) -> str:
    """What the readers of format `to` cannot use of the tokenizer that is copied; "" if nothing.

    `of_meta`: the source is a Meta release, whose readers open the tokenizer.model.
    """
    path = assets.get(TIKTOKEN_MODEL)
    if to in ("meta", "torchtune") or (to == "hf" and of_meta):
        problem = disagreement(assets, meta_vocab_size=vocab_size if to == "meta" else None)
        if problem:
            reader, file = ("transformers", TOKENIZER_JSON) if to == "hf" else (_READERS[to], TIKTOKEN_MODEL)
            return f"{TOKENIZER_JSON} and {TIKTOKEN_MODEL} give other ids ({problem}); {reader} reads {file}"
    try:
        if to == "meta" and path is None and TOKENIZER_JSON in assets:
            ranks_of_tokenizer_json(assets[TOKENIZER_JSON], vocab_size=vocab_size)
        elif to == "hf" and path is not None and TOKENIZER_JSON not in assets and looks_like_tiktoken(path):
            require_of_llama(path, num_ranks := len(read_ranks(path)))
            if num_ranks > vocab_size - 2:
                return (
                    f"{TIKTOKEN_MODEL} is copied, and no {TOKENIZER_JSON} is made from it: its {num_ranks:,} "
                    f"tokens leave no room for begin and end of text in {vocab_size:,} rows"
                )
        elif to == "hf" and path is not None and TOKENIZER_JSON not in assets:
            if (model := read_sentencepiece(path)) is None:
                return f"{TIKTOKEN_MODEL} is copied unread: it is neither tiktoken nor SentencePiece"
            require_exact(model)
        elif to == "hf" and MOONSHOT_RANKS in assets and TOKENIZER_JSON not in assets:
            return f"transformers opens {MOONSHOT_RANKS} with a Python class of the model's folder, which is not copied"
    except CheckpointError:  # another remark says that it cannot be read
        return ""
    except UnsupportedError as error:
        carried, wanted = (TOKENIZER_JSON, "Meta's code") if to == "meta" else (TIKTOKEN_MODEL, "transformers")
        return f"{carried} is copied without a translation, {wanted} may not open it: {error.message}"
    return ""


def largest_token_id(assets: Mapping[str, Path]) -> int | None:
    """The largest id of the tokenizer among the copied files; None where that is not known.

    Raises CheckpointError and UnsupportedError where it cannot be read.
    """
    if TOKENIZER_JSON in assets:
        return _read_ids(*_versions(assets)).largest
    if TIKTOKEN_MODEL in assets and looks_like_tiktoken(assets[TIKTOKEN_MODEL]):
        return max(read_ranks(assets[TIKTOKEN_MODEL]).values(), default=None)
    if TIKTOKEN_MODEL in assets and (model := read_sentencepiece(assets[TIKTOKEN_MODEL])):
        return len(model.pieces) - 1
    if MOONSHOT_RANKS in assets and TIKTOKEN_MODEL not in assets:
        return max(moonshot.special_tokens(assets, len(read_ranks(assets[MOONSHOT_RANKS]))).values())
    return None


@dataclass(frozen=True, slots=True)
class _Ids:
    largest: int
    named: Mapping[str, int]  # bos_token_id, … that tokenizer_config.json names


def _versions(assets: Mapping[str, Path]) -> tuple[tuple[Path, int, int] | None, ...]:
    """tokenizer.json and tokenizer_config.json, with size and time, which identify their content."""
    found = []
    for name in (TOKENIZER_JSON, TOKENIZER_CONFIG):
        status = assets[name].stat() if name in assets else None
        found.append((assets[name], status.st_mtime_ns, status.st_size) if status else None)
    return tuple(found)


@lru_cache(maxsize=2)  # one tokenizer is read twice, and may be 30 MB of JSON
def _read_ids(tokenizer: tuple[Path, int, int], settings: tuple[Path, int, int] | None) -> _Ids:
    id_of, next_id = read_table(tokenizer[0])
    config = read_json(settings[0]) if settings else {}
    largest = max([next_id + count_lacking(config, id_of) - 1, *(id for id in id_of.values() if isinstance(id, int))])
    if settings:
        id_of = id_of | tokens_only_in_config({TOKENIZER_CONFIG: settings[0]}, id_of, next_id)
    named = {key: token_text(config.get(key.removesuffix("_id"))) for key in TOKEN_IDS}
    return _Ids(largest, {key: id_of[text] for key, text in named.items() if text in id_of})
