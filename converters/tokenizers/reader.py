"""Read the tokenizer of a folder with the `tokenizers` library, as transformers 5.23 reads it.

Every file that holds a vocabulary becomes what a tokenizer.json would hold, and gets all that the folder declares
beside it. Truncation and padding, which a training script may have left in the file, are reset.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.version import Version
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE, Unigram

from converters.common.errors import CheckpointError, TitanError, UnsupportedError
from converters.common.names import (
    ADDED_TOKENS,
    HF_CONFIG,
    MERGES,
    MODEL_INFO,
    MOONSHOT_RANKS,
    SPECIAL_TOKENS_MAP,
    TIKTOKEN_MODEL,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    UNTRANSLATED,
    VOCAB_JSON,
)
from converters.store.json_file import read_json
from converters.store.local_files import is_file, read_bytes, read_text, stamp
from converters.tokenizers import moonshot
from converters.tokenizers.classes import CLASSES, TokenizerClass, class_name
from converters.tokenizers.declared import ROLES, Declared, Token, read_declared
from converters.tokenizers.sentencepiece_model import (
    BPE_TYPE,
    CONTROL,
    USER_DEFINED,
    SentencePiece,
    read_sentencepiece,
)
from converters.tokenizers.tiktoken_model import (
    BEGIN,
    END,
    LLAMA3_PATTERN,
    RELEASED_VOCAB,
    byte_level_bpe,
    looks_like_tiktoken,
    pattern_of,
    read_ranks,
    require_of_llama,
    special_tokens_after,
)
from converters.tokenizers.tokenizer_json import read_tokenizer_json

READER_VERSION = 3  # an older one may give other ids for the same files

_SPACE = "\u2581"
_FEWEST_OF_MISTRAL = 100_000  # tokens; those of larger vocabularies were published with a wrong pattern
_MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_NUM_SPECIAL = 10  # named special tokens behind the ranks of a small tokenizer.model


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """A tokenizer, the special tokens that have a name, and what else the folder says of it.

    `named`: bos_token, eos_token, …, and names of the model's own, all of which a chat template may use. `settings`:
    of tokenizer_config.json and special_tokens_map.json. `pieces_of`: cuts a text that is encoded in pieces.
    """

    tokenizer: Tokenizer
    named: Mapping[str, str]
    settings: Mapping[str, Any]
    where: Path
    pieces_of: Callable[[str], Iterator[str]] | None = None

    def id_of(self, name: str) -> int | None:
        """The id of a named token, None without one."""
        text = self.named.get(name)
        if text is None:
            return None
        return self.tokenizer.token_to_id(text)


def vocabulary_file(assets: Mapping[str, Path]) -> Path | None:
    """The file that decides ids; None if there is none."""
    found = next((assets[n] for n in (TOKENIZER_JSON, TIKTOKEN_MODEL, MOONSHOT_RANKS) if n in assets), None)
    if found is None and VOCAB_JSON in assets:
        cls = CLASSES.get(_class_of(assets, assets[VOCAB_JSON]))
        return assets[VOCAB_JSON] if cls and not cls.from_sentencepiece else None
    return found


def is_metas(assets: Mapping[str, Path]) -> bool:
    """Whether there is a tokenizer.model alone, with nothing beside it that declares a token: a release of Meta.

    Meta's code knows its special tokens and the begin of text; transformers would take it for a vocabulary without any.
    """
    model = assets.get(TIKTOKEN_MODEL)
    if model is None or assets.keys() & {TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS}:
        return False
    return looks_like_tiktoken(model) or not is_file(model.parent / HF_CONFIG)


def implied_class(assets: Mapping[str, Path]) -> str | None:
    """The class of transformers that reads a folder; None if there is none, or the reader is another."""
    path = vocabulary_file(assets)
    if path is None or is_metas(assets) or (path.name == MOONSHOT_RANKS and "auto_map" in _settings(assets)):
        return None
    try:
        return _class_of(assets, path)
    except UnsupportedError:
        return None


def read_folder_tokenizer(assets: Mapping[str, Path], *, with_merges: bool = True) -> FolderTokenizer:
    """The tokenizer of a folder's files. Raises CheckpointError or UnsupportedError.

    Without merges it is good for ids of tokens only, and read in a fraction of the memory. The last one is kept.
    """
    path = vocabulary_file(assets)
    place = path.parent if path else Path()
    beside = (place / HF_CONFIG, place / MODEL_INFO, place.parent / MODEL_INFO)  # see _model_config
    files = [*(assets[name] for name in sorted(assets)), *(file for file in beside if is_file(file))]
    stamps = [(str(file), *stamp(file)) for file in files]
    return _read(tuple(assets.items()), with_merges, tuple(stamps))


@lru_cache(maxsize=2)  # of one command, which may ask for ids and for text
def _read(files: tuple[tuple[str, Path], ...], with_merges: bool, stamps: tuple[Any, ...]) -> FolderTokenizer:
    assets = dict(files)
    path = vocabulary_file(assets)
    if path is None:
        raise CheckpointError(
            f"there is no {TOKENIZER_JSON} or {TIKTOKEN_MODEL}",
            hint="a prepared data folder, an HF folder and a checkpoint's assets hold one",
        )
    with library_errors(path):
        if path.name == MOONSHOT_RANKS and "auto_map" in _settings(assets):
            return _of_moonshot(assets, path, with_merges=with_merges)
        if is_metas(assets):
            return _of_meta(path, with_merges=with_merges)
        return _as_transformers(assets, path, with_merges=with_merges)


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Around calls of the tokenizers library on the content of `path`. Raises CheckpointError for damaged content.

    The library raises a bare Exception, or PanicException, which is a BaseException and has no module to import.
    """
    try:
        yield
    except TitanError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{path}: not a tokenizer: {error or type(error).__name__}",
            hint="the tokenizer's files are damaged, or contradict each other; fetch or save them again",
        ) from None


def _of_moonshot(assets: Mapping[str, Path], path: Path, *, with_merges: bool) -> FolderTokenizer:
    ranks = read_ranks(path)
    special = moonshot.special_tokens(assets, len(ranks))
    in_order = sorted(special, key=special.__getitem__)
    tokenizer = byte_level_bpe(ranks, moonshot.PATTERN, in_order, with_merges=with_merges)
    settings = read_json(assets[TOKENIZER_CONFIG])
    names = {key: token["content"] if isinstance(token := settings.get(key), dict) else token for key in ROLES}
    named = {key: text for key, text in names.items() if text in special}
    return FolderTokenizer(tokenizer, named, settings, path, moonshot.parts_of)


def _of_meta(path: Path, *, with_merges: bool) -> FolderTokenizer:
    if not looks_like_tiktoken(path):
        raise CheckpointError(f"{path}: a SentencePiece file that comes alone is read by its own library")
    ranks = read_ranks(path)
    missing = 256 - sum(bytes([value]) in ranks for value in range(256))
    if missing:
        raise CheckpointError(f"{path}: {missing} of the 256 single bytes have no rank, so some text has no ids")
    require_of_llama(path, len(ranks))
    size = RELEASED_VOCAB.get(len(ranks), len(ranks) + _NUM_SPECIAL)
    special = special_tokens_after(len(ranks), vocab_size=size)
    tokenizer = byte_level_bpe(ranks, pattern_of(len(ranks)), special, with_merges=with_merges)
    tokenizer.post_processor = _template([(BEGIN, len(ranks))], [])
    return FolderTokenizer(tokenizer, {"bos_token": BEGIN, "eos_token": END}, {}, path)


def _settings(assets: Mapping[str, Path]) -> dict[str, Any]:
    return read_json(assets[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in assets else {}


def _class_of(assets: Mapping[str, Path], path: Path) -> str:
    def is_byte_level() -> bool:
        return path.name == TOKENIZER_JSON and b'"ByteLevel"' in read_bytes(path)

    return class_name(_settings(assets), _model_config(path.parent), is_byte_level=is_byte_level)


def _model_config(folder: Path) -> Mapping[str, Any]:
    """The config.json beside a tokenizer, for its class; a checkpoint of titan says it in titan_model.json."""
    if is_file(folder / HF_CONFIG):
        return read_json(folder / HF_CONFIG)
    if (place := next((place for place in (folder, folder.parent) if is_file(place / MODEL_INFO)), None)) is None:
        return {}
    content = read_json(place / MODEL_INFO)
    config = dict(content.get(UNTRANSLATED) or {})
    return config | {"model_type": content.get("family")}  # of qwen3, the only one that matters, it is the name


def _as_transformers(assets: Mapping[str, Path], path: Path, *, with_merges: bool) -> FolderTokenizer:
    content, merges = read_tokenizer_json(path) if path.name == TOKENIZER_JSON else (None, ())
    cls = CLASSES.get(_class_of(assets, path))
    described = None if content is None else content.get("added_tokens") or []
    if content is not None and not (
        isinstance(content.get("model"), dict) and all(map(_is_added_token, described or ()))
    ):
        raise CheckpointError(f"{path}: not a tokenizer: it has no model, or no readable added_tokens")
    declared = read_declared(assets, described)
    settings, pairs = dict(declared.settings), [_pair(merge) for merge in merges] if with_merges and cls else []
    if content is not None and (padding := content.get("padding")):
        settings = {"pad_token": padding["pad_token"], **settings}
    if content is not None and cls is None:
        tokenizer = Tokenizer.from_file(str(path)) if with_merges else _without_merges(content)
    elif content is not None and cls is not None:
        settings = {**settings, **cls.defaults, **declared.settings}
        tokenizer = cls.build(_vocabulary(content["model"]["vocab"]), pairs, settings)
        if content.get("post_processor"):
            tokenizer.post_processor = _post_processor(content)
    elif path.name == VOCAB_JSON:
        assert cls is not None
        settings = {**cls.defaults, **settings}
        lines = _merges_txt(assets[MERGES]) if MERGES in assets and with_merges else []
        tokenizer = cls.build(read_json(path), lines, settings)
    elif (model := read_sentencepiece(path)) is not None:
        tokenizer = _of_sentencepiece(model, cls, declared, settings, with_merges=with_merges)
    elif looks_like_tiktoken(path):
        tokenizer = _of_tiktoken(path, declared, with_merges=with_merges)
        settings = {**(cls.defaults if cls else {}), **settings}
    else:
        raise CheckpointError(f"{path}: neither a tiktoken nor a SentencePiece file")
    named = _add_declared(tokenizer, cls, declared, settings)
    _refuse_mistral_regex(tokenizer, settings, path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return FolderTokenizer(tokenizer, {key: str(token) for key, token in named.items()}, settings, path)


def _add_declared(
    tokenizer: Tokenizer, cls: TokenizerClass | None, declared: Declared, settings: dict[str, Any]
) -> dict[str, Token]:
    """Add what the folder declares as TokenizersBackend's constructor does. Returns the tokens that have a name."""
    defaults = {
        key: settings[key] for key in (cls.defaults if cls else ()) if key.endswith("_token") and key not in ROLES
    }
    named: dict[str, Token] = {key: settings[key] for key in ROLES if settings.get(key) is not None}
    named |= {key: token for key, token in defaults.items() if isinstance(token, str)} | declared.named
    extra = settings.get("extra_special_tokens", [])
    if "extra_special_tokens" not in settings:
        extra = [*(settings.get("additional_special_tokens") or []), *(cls.extra if cls else ())]
    says_ends = "add_bos_token" in settings or "add_eos_token" in settings
    tokens: list[Token] = [declared.added[id] for id in sorted(declared.added)]
    listed = {token.content for token in tokenizer.get_added_tokens_decoder().values()} | set(map(str, tokens))
    for token in (*named.values(), *(extra or ())):
        if str(token) not in listed and token not in tokens:
            tokens.append(token)
    names = set(map(str, named.values()))
    for index, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[index] = AddedToken(token, special=True)
        elif not token.special and str(token) in names:
            token.special = True
    tokenizer.add_tokens(tokens)
    if says_ends or tokenizer.post_processor is None or (cls and cls.resets_post_processor):
        _update_post_processor(tokenizer, named, settings)
    if cls and cls.adds_named:
        every = dict.fromkeys([*map(str, named.values()), *map(str, extra or ())])
        tokenizer.add_tokens([AddedToken(text, special=True) for text in every])
    return named


def _refuse_mistral_regex(tokenizer: Tokenizer, settings: Mapping[str, Any], path: Path) -> None:
    """Raise if transformers would replace the pattern of tokenizer.json by what `config.json` says.

    Copies of the tokenizer without that config.json would be read with the old pattern.
    """
    config = path.parent / HF_CONFIG
    if not settings.get("fix_mistral_regex") or not is_file(config) or tokenizer.pre_tokenizer is None:
        return
    content = read_json(config)
    made_by, kind = content.get("transformers_version"), content.get("model_type")
    is_new = made_by and Version(made_by) >= Version("5.0.0")
    if tokenizer.get_vocab_size() > _FEWEST_OF_MISTRAL and not is_new and kind in (None, *_MISTRAL_TYPES):
        raise UnsupportedError(
            f"{path.parent / TOKENIZER_CONFIG}: fix_mistral_regex, with which transformers replaces the pattern that"
            " splits text, is not supported",
            hint="AutoTokenizer's save_pretrained writes the replaced pattern into tokenizer.json; then remove"
            " fix_mistral_regex from tokenizer_config.json",
        )


def _update_post_processor(tokenizer: Tokenizer, named: Mapping[str, Token], settings: Mapping[str, Any]) -> None:
    def ends(role: str) -> list[tuple[str, int]]:
        if not settings.get(f"add_{role}") or role not in named:
            return []
        text = str(named[role])
        if not text:  # transformers takes the unknown token in its place
            raise ValueError(f"{role} is the empty string, and add_{role} is true: name it in {TOKENIZER_CONFIG}")
        id = tokenizer.token_to_id(text)
        assert id is not None  # a named token was added if it was missing
        return [(text, id)]

    tokenizer.post_processor = _template(ends("bos_token"), ends("eos_token"))


def _template(begin: list[tuple[str, int]], end: list[tuple[str, int]]) -> processors.TemplateProcessing:
    first, last = ([token for token, _ in ends] for ends in (begin, end))
    return processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=list({*begin, *end}))


def _of_sentencepiece(
    model: SentencePiece, cls: TokenizerClass | None, declared: Declared, settings: dict[str, Any], *, with_merges: bool
) -> Tokenizer:
    """Convert as SentencePieceExtractor of transformers; control tokens and user-defined ones are added."""
    is_bpe = cls is not None or model.model_type == BPE_TYPE
    vocab = {text: id for id, (text, _, _) in enumerate(model.pieces)}
    merges = _all_splits(vocab) if is_bpe and with_merges else []
    settings["additional_special_tokens"] = [
        AddedToken(text, normalized=False, special=kind == CONTROL)
        for text, _, kind in model.pieces
        if kind in (CONTROL, USER_DEFINED)
    ]
    if cls is not None:
        settings.update({**cls.defaults, **settings})
        return cls.build(vocab, merges, settings)
    if is_bpe:
        text_of = {id: text for text, id in vocab.items()}
        for id, token in declared.added.items():  # a placeholder of the vocabulary that has got another text
            current = text_of.get(id)
            if current and current != str(token) and str(token) not in vocab:
                vocab[str(token)] = vocab.pop(current)
        unk = model.control["unk"]
        tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=model.byte_fallback))
    else:
        scored = [(text, score) for text, score, _ in model.pieces]
        tokenizer = Tokenizer(Unigram(scored, unk_id=model.ids["unk"], byte_fallback=model.byte_fallback))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if model.charsmap:
        steps.insert(0, normalizers.Precompiled(model.charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    fallback = [decoders.ByteFallback(), decoders.Fuse()] if model.byte_fallback else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), *fallback])
    for name in ("bos", "eos", "unk"):
        if model.ids[name] >= 0:
            settings.setdefault(f"{name}_token", model.control[name])
    return tokenizer


def _of_tiktoken(path: Path, declared: Declared, *, with_merges: bool) -> Tokenizer:
    """Convert as TikTokenConverter of transformers: Llama 3's pattern; special tokens from tokenizer_config.json."""
    ranks = read_ranks(path)
    extra = [str(token) for token in declared.settings.get("extra_special_tokens") or []]
    last = max(declared.added, default=-1)
    if last >= len(ranks):
        listed = [str(declared.added.get(id, f"<|reserved_token_{id}|>")) for id in range(len(ranks), last + 1)]
        extra = [*listed, *(text for text in extra if text not in listed)]
    return byte_level_bpe(ranks, LLAMA3_PATTERN, extra, with_merges=with_merges)


def _all_splits(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair that makes a piece, in the order of the pieces' ids."""
    merges = []
    for text, id in vocab.items():
        pairs = ((text[:place], text[place:]) for place in range(1, len(text)))
        local = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        merges += [(id, *pair) for pair in sorted(local, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])))
    return [(left, right) for _, left, right in merges]


def _is_added_token(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), int) and isinstance(entry.get("content"), str)


def _vocabulary(found: Any) -> dict[str, int]:
    if isinstance(found, dict):
        return found
    return {entry[0] if isinstance(entry, list) else entry: id for id, entry in enumerate(found)}


def _without_merges(content: Mapping[str, Any]) -> Tokenizer:
    model = dict(content["model"])
    if model.get("type", "BPE") == "BPE":
        model["merges"] = []
    return Tokenizer.from_str(json.dumps({**content, "model": model}))


def _post_processor(content: Mapping[str, Any]) -> processors.PostProcessor:
    frame = {**content, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    found: processors.PostProcessor = Tokenizer.from_str(json.dumps(frame)).post_processor
    return found


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _merges_txt(path: Path) -> list[tuple[str, str]]:
    lines = read_text(path).split("\n")
    return [_pair(line) for line in lines if line and not line.startswith("#version")]
