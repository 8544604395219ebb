"""The files that are copied along with weights: tokenizer, chat template, generation config; and their token ids."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError
from converters.common.names import (
    ADDED_TOKENS,
    ASSETS_FOLDER,
    DCP_METADATA,
    HF_GENERATION_CONFIG,
    MERGES,
    META_PARAMS,
    MOONSHOT_RANKS,
    SPECIAL_TOKENS_MAP,
    TIKTOKEN_MODEL,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    VOCAB_JSON,
)
from converters.store.json_file import read_json, write_json
from converters.store.local_files import copy_file, is_file, names_in, size
from converters.store.paths import refuse_links_out
from converters.tokenizers.agreement import disagreement
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
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
    "chat_template.jinja",
    "chat_template.json",
    VOCAB_JSON,
    MERGES,
)
# The licence, which must accompany a copy of the model, and the model card
DOCUMENT = re.compile(
    r"(?i)((readme|licen[cs]e|notice|copying|(acceptable_)?use_policy)([ ._-].*)?(?<!\.py)(?<!\.json)|.+\.md)"
)
_MOST_OF_DOCUMENT = 16 << 20  # bytes
_WEIGHTS = re.compile(
    re.escape(DCP_METADATA) + r"|.*\.safetensors|consolidated\.\d+\.pth|(pytorch_)?model(-\d.*)?\.(bin|pt|pth)"
)
TOKENIZERS = (TOKENIZER_JSON, TIKTOKEN_MODEL, MOONSHOT_RANKS, VOCAB_JSON)
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
        further = [f"{CHAT_TEMPLATES}/{n}" for n in names_in(place / CHAT_TEMPLATES) if n.endswith(".jinja")]
        for name in (*CARRIED, *further):
            if name not in found and is_file(place / name):
                found[name] = place / name
    return found


def find_documents(folder: Path) -> dict[str, Path]:
    """Licence and model card of the weights in a folder, by name; none if the folder has no weights.

    A project's own README.md in a folder that has only a config or a tokenizer is not the model's.
    """
    if not any(_WEIGHTS.fullmatch(name) for name in names_in(folder)):
        return {}
    documents = {}
    for parent in (folder, folder / ASSETS_FOLDER):
        for name in names_in(parent):
            if name not in documents and _is_document(folder, parent / name):
                documents[name] = parent / name
    return documents


def _is_document(folder: Path, path: Path) -> bool:
    if not (path.name.isprintable() and DOCUMENT.fullmatch(path.name) and is_file(path)):
        return False
    if size(path) > _MOST_OF_DOCUMENT:
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
    """The token ids that the tokenizer names, below `vocab_size`; none for a kind that is not read."""
    from converters.tokenizers.reader import is_metas, read_folder_tokenizer, vocabulary_file

    model = assets.get(TIKTOKEN_MODEL)
    if vocabulary_file(assets) is None:
        return {}
    described = assets.get(TOKENIZER_JSON)
    in_metas_folder = model and described == model.parent / TOKENIZER_JSON and is_file(model.parent / META_PARAMS)
    if model and (is_metas(assets) or in_metas_folder) and looks_like_tiktoken(model):
        return _ids_of_meta(assets, model, vocab_size)
    if model and is_metas(assets):
        sentencepiece = read_sentencepiece(model)
        return sentencepiece.token_ids() if sentencepiece else {}
    try:
        tokenizer = read_folder_tokenizer(assets, with_merges=False)
    except UnsupportedError:  # a remark of the report says why
        return {}
    ids = {key: tokenizer.id_of(key.removesuffix("_id")) for key in TOKEN_IDS}
    return {key: id for key, id in ids.items() if id is not None and id < vocab_size}


def _ids_of_meta(assets: Mapping[str, Path], model: Path, vocab_size: int) -> dict[str, Any]:
    if TOKENIZER_JSON in assets:
        from converters.tokenizers.reader import read_folder_tokenizer

        id_of = read_folder_tokenizer(assets, with_merges=False).tokenizer.get_vocab()
    else:
        if not is_of_llama(num_ranks := len(read_ranks(model))):
            return {}
        special = special_tokens_after(num_ranks, vocab_size=vocab_size)
        id_of = {token: num_ranks + i for i, token in enumerate(special)}
    ends = [id_of[token] for token in _LLAMA_ENDS if token in id_of]
    return {"bos_token_id": id_of[BEGIN], "eos_token_id": ends} if ends and BEGIN in id_of else {}


def write_assets(folder: Path, assets: Mapping[str, Path], generation: Mapping[str, Any]) -> list[str]:
    """Copy the carried files into `folder`, and make a generation config of `generation` if there is none.

    Returns the names.
    """
    if not assets and not generation:
        return []
    for name, path in assets.items():
        copy_file(path, folder / name)
    written = [*assets, *_write_class(folder, assets)]
    if generation and HF_GENERATION_CONFIG not in assets:
        write_json(folder / HF_GENERATION_CONFIG, dict(generation))
        written.append(HF_GENERATION_CONFIG)
    return written


def _write_class(folder: Path, assets: Mapping[str, Path]) -> list[str]:
    """Name the tokenizer's class in the copied tokenizer_config.json, if the source's config.json implied it.

    Returns the name of the file if it is new.
    """
    from converters.tokenizers.reader import implied_class

    copied = {name: folder / name for name in assets}
    name = implied_class(assets)
    if name is None or implied_class(copied) == name:
        return []
    config = read_json(copied[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in copied else {}
    write_json(folder / TOKENIZER_CONFIG, config | {"tokenizer_class": name})
    return [] if config else [TOKENIZER_CONFIG]


def write_tokenizer_for_hf(folder: Path, assets: Mapping[str, Path], *, vocab_size: int, max_seq_len: int) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json for a tokenizer.model of Meta's, which transformers misreads.

    Writes nothing if there is a tokenizer.json, or if none would be exact. Returns the names written.
    """
    from converters.tokenizers.reader import is_metas

    path = assets.get(TIKTOKEN_MODEL)
    if path is None or not is_metas(assets):  # transformers opens the files as they are
        return []
    try:
        if looks_like_tiktoken(path):
            return write_hf_tokenizer(folder, path, vocab_size=vocab_size, max_seq_len=max_seq_len)
        model = read_sentencepiece(path)
        return write_tokenizer_of_sentencepiece(folder, model, max_seq_len=max_seq_len) if model else []
    except (CheckpointError, UnsupportedError):  # tokenizer.model is copied unchanged; a remark of the report says why
        return []


def write_tokenizer_for_meta(folder: Path, assets: Mapping[str, Path], *, vocab_size: int) -> list[str]:
    """Write tokenizer.model (tiktoken) for a tokenizer.json, which Meta's code cannot open, if it is exact."""
    if TIKTOKEN_MODEL in assets or TOKENIZER_JSON not in assets:
        return []
    try:
        ranks = ranks_of_tokenizer_json(assets[TOKENIZER_JSON], vocab_size=vocab_size)
    except (CheckpointError, UnsupportedError):
        return []
    write_ranks(folder / TIKTOKEN_MODEL, ranks)
    return [TIKTOKEN_MODEL]


def tokenizer_remark(assets: Mapping[str, Path], *, to: str, vocab_size: int, of_meta: bool = False) -> str:
    """A remark on what the readers of format `to` cannot use of the tokenizer that is copied; "" if there is nothing.

    `of_meta`: the source is a Meta release, whose readers open the tokenizer.model.
    """
    from converters.tokenizers.reader import is_metas, read_folder_tokenizer, vocabulary_file

    path = assets.get(TIKTOKEN_MODEL)
    if to in ("meta", "torchtune") or (to == "hf" and of_meta):
        problem = disagreement(assets, meta_vocab_size=vocab_size if to == "meta" else None)
        if problem:
            reader, file = ("transformers", TOKENIZER_JSON) if to == "hf" else (_READERS[to], TIKTOKEN_MODEL)
            return f"{TOKENIZER_JSON} and {TIKTOKEN_MODEL} give other ids ({problem}); {reader} reads {file}"
    try:
        if to == "meta" and path is None and TOKENIZER_JSON in assets:
            ranks_of_tokenizer_json(assets[TOKENIZER_JSON], vocab_size=vocab_size)
        elif to != "hf" or TOKENIZER_JSON in assets:
            return ""
        elif path is not None and is_metas(assets) and looks_like_tiktoken(path):
            require_of_llama(path, num_ranks := len(read_ranks(path)))
            if num_ranks > vocab_size - 2:
                return (
                    f"{TIKTOKEN_MODEL} is copied, and no {TOKENIZER_JSON} is made from it: its {num_ranks:,} "
                    f"tokens leave no room for begin and end of text in {vocab_size:,} rows"
                )
        elif path is not None and is_metas(assets):
            if (model := read_sentencepiece(path)) is None:
                return f"{TIKTOKEN_MODEL} is copied unread: it is neither tiktoken nor SentencePiece"
            require_exact(model)
        elif path is None and MOONSHOT_RANKS in assets:
            return f"transformers opens {MOONSHOT_RANKS} with a Python class of the model's folder, which is not copied"
        elif vocabulary_file(assets) is not None:
            read_folder_tokenizer(assets, with_merges=False)
    except CheckpointError:  # another remark says that it cannot be read
        return ""
    except UnsupportedError as error:
        carried, wanted = (TOKENIZER_JSON, "Meta's code") if to == "meta" else (TIKTOKEN_MODEL, "transformers")
        return f"{carried} is copied without a translation, {wanted} may not open it: {error.message}"
    return ""


def largest_token_id(assets: Mapping[str, Path]) -> int | None:
    """The largest id of the tokenizer among the copied files; None if that is not known.

    Raises CheckpointError and UnsupportedError if it cannot be read.
    """
    from converters.tokenizers.reader import is_metas, read_folder_tokenizer, vocabulary_file

    if (path := vocabulary_file(assets)) is None:
        return None
    if is_metas(assets):  # the number of its special tokens follows from the model
        if looks_like_tiktoken(path):
            return max(read_ranks(path).values(), default=None)
        model = read_sentencepiece(path)
        return len(model.pieces) - 1 if model else None
    return max(read_folder_tokenizer(assets, with_merges=False).tokenizer.get_vocab().values(), default=None)
