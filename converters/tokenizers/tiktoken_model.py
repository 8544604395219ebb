"""Meta's tokenizer.model (tiktoken text) and the tokenizer.json that gives the same ids."""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from converters.common.errors import CheckpointError, UnsupportedError
from converters.common.names import TIKTOKEN_MODEL, TOKENIZER_JSON
from converters.store.local_files import new_text, read_bytes, read_start
from converters.tokenizers.tokenizer_json import write_tokenizer_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How Llama 3 splits text before merging (llama-models, models/llama3/tokenizer.py)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# and Llama 4 (models/llama4/tokenizer.py), as OpenAI's o200k does
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LLAMA4_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTED + "|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTED + "|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
_NAMED = (
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)
_NUM_RELEASED_RANKS = 128000
_LLAMA4_RANKS = 200000


def _reserved(kind: str, first: int, end: int) -> tuple[str, ...]:
    return tuple(f"<|{kind}reserved_special_token_{i}|>" for i in range(first, end))


_LLAMA4_NAMED = (
    *(BEGIN, END, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"),
    *_reserved("text_post_train_", 0, 6),
    *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
    *_reserved("text_post_train_", 8, 69),
    *("<|image_start|>", "<|image_end|>"),
    *_reserved("vision_", 0, 2),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
    *_reserved("vision_", 2, 6),
    "<|image|>",
    *_reserved("vision_", 6, 7),
    "<|patch|>",
    *_reserved("vision_", 7, 1048),
    *_reserved("reasoning_", 0, 8),
    *("<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"),
)
# Others that are distributed as tiktoken text, by number of ranks: with another pattern or other special tokens
_NOT_OF_LLAMA = {
    50256: "OpenAI's r50k_base (GPT-2)",
    50280: "OpenAI's p50k_base",
    100256: "OpenAI's cl100k_base (GPT-4)",
    151643: "Qwen's qwen.tiktoken",
    163584: "Moonshot's tiktoken.model (Kimi)",
    199998: "OpenAI's o200k_base (GPT-4o, GPT-OSS)",
}
RELEASED_VOCAB = {_NUM_RELEASED_RANKS: 128256, _LLAMA4_RANKS: 202048}  # by number of ranks, with special tokens


def pattern_of(num_ranks: int) -> str:
    """The pattern by which the code of the release with so many ranks splits text; Llama 3's for others."""
    return LLAMA4_PATTERN if is_llama4(num_ranks) else LLAMA3_PATTERN


def is_llama4(num_ranks: int) -> bool:
    """Whether a tokenizer.model with so many ranks is that of Llama 4's releases."""
    return num_ranks == _LLAMA4_RANKS


def is_of_llama(num_ranks: int) -> bool:
    """Whether a tokenizer.model with so many ranks, without a tokenizer.json, may be read as Llama's."""
    return num_ranks not in _NOT_OF_LLAMA


def require_of_llama(model: Path, num_ranks: int) -> None:
    """Raises UnsupportedError for the rank file of another vocabulary, which does not hold its special tokens."""
    if not is_of_llama(num_ranks):
        raise UnsupportedError(
            f"{model} has {num_ranks:,} ranks, as {_NOT_OF_LLAMA[num_ranks]}; a {TIKTOKEN_MODEL} that comes alone is "
            "read with the rules and special tokens of Llama 3 or 4",
            hint=f"put the model's {TOKENIZER_JSON} beside it, which is then read",
        )


def special_tokens_after(num_ranks: int, *, vocab_size: int) -> list[str]:
    """The special tokens of a tokenizer.model alone, in the order of their ids from `num_ranks` on.

    Meta's releases have 256, with the first two reserved ones among the named, and Llama 4's 2048; small ones have
    only named ones.
    """
    if is_llama4(num_ranks):
        end = max(0, vocab_size - num_ranks)
        return [*_LLAMA4_NAMED, *_reserved("", 0, max(0, end - len(_LLAMA4_NAMED)))][:end]
    first_reserved = 2 if num_ranks == _NUM_RELEASED_RANKS else 0
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(max(0, vocab_size - num_ranks))]
    listed = [BEGIN, END, *reserved[:first_reserved], *_NAMED, *reserved[first_reserved:]]
    return listed[: max(0, vocab_size - num_ranks)]


def looks_like_tiktoken(path: Path) -> bool:
    """Whether a tokenizer.model is tiktoken text; the other kind, SentencePiece, is binary."""
    line = read_start(path, 4096).partition(b"\n")[0].split()
    return len(line) == 2 and line[1].isdigit() and _is_base64(line[0])


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes → rank. Raises CheckpointError unless ranks are consecutive from 0."""
    ranks = {}
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        token, _, rank = line.strip().partition(b" ")
        if not token:
            continue
        if not rank.isdigit():
            raise CheckpointError(f"{path}, line {number}: not `<base64> <rank>`")
        try:
            ranks[binascii.a2b_base64(token, strict_mode=True)] = int(rank)
        except ValueError:
            raise CheckpointError(f"{path}, line {number}: not `<base64> <rank>`") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: ranks are not consecutive from 0, or a token is repeated")
    return ranks


def write_hf_tokenizer(folder: Path, model: Path, *, vocab_size: int, max_seq_len: int) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json for transformers, from a tiktoken file. Returns their names."""
    ranks = read_ranks(model)
    require_of_llama(model, len(ranks))
    special = special_tokens_after(len(ranks), vocab_size=vocab_size)
    if len(special) < 2:
        raise CheckpointError(
            f"{model} has {len(ranks)} tokens, the model only {vocab_size}: no room for begin and end of text",
            hint="is this the tokenizer of this model?",
        )
    frame = json.dumps(_without_tokens(special, pattern_of(len(ranks)), first_id=len(ranks)), ensure_ascii=False)
    head, between, tail = re.split(r"(?<=\"vocab\": \{)(?=\})|(?<=\"merges\": \[)(?=\])", frame)
    with new_text(folder / TOKENIZER_JSON) as file:  # without holding the 280,000 merges of a Llama 3
        file.write(head)
        _write_items(file, (f"{_quoted(token)}: {rank}" for token, rank in ranks.items()))
        file.write(between)
        _write_items(file, (f"[{_quoted(left)}, {_quoted(right)}]" for left, right in _merges(ranks)))
        file.write(tail)
    tokens = {"bos_token": BEGIN, "eos_token": END}
    return [TOKENIZER_JSON, *write_tokenizer_config(folder, tokens, max_seq_len=max_seq_len)]


def byte_level_bpe(
    ranks: Mapping[bytes, int], pattern: str, special: Sequence[str], *, with_merges: bool = True
) -> "Tokenizer":
    """The tokenizer of the `tokenizers` library that gives tiktoken's ids; the special tokens follow the ranks."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocab = {_letters(token): rank for token, rank in ranks.items()}
    merges = [(_letters(left), _letters(right)) for left, right in _merges(ranks)] if with_merges else []
    # ignore_merges: tiktoken does not merge a piece that is a token
    tokenizer = Tokenizer(BPE(vocab, merges, fuse_unk=False, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _without_tokens(special: Sequence[str], pattern: str, *, first_id: int) -> dict[str, Any]:
    """tokenizer.json's content without vocabulary and merges, from the `tokenizers` library."""
    from tokenizers import processors

    tokenizer = byte_level_bpe({}, pattern, special)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, first_id)]
            ),
        ]
    )
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    for index, token in enumerate(content["added_tokens"]):  # numbered from 0, because there are no other tokens here
        token["id"] = first_id + index
    return content


def _write_items(file: TextIO, items: Iterable[str]) -> None:
    for number, item in enumerate(items):
        file.write(f", {item}" if number else item)


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair that makes a token, in the order of tiktoken's merging: by the rank of the token."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        yield from sorted(
            (p for p in pairs if p[0] in ranks and p[1] in ranks), key=lambda p: (ranks[p[0]], ranks[p[1]])
        )


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte: itself if it prints, else the next free code point from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()


def _letters(token: bytes) -> str:
    return token.decode("latin-1").translate(BYTE_LETTERS)


def _quoted(token: bytes) -> str:
    return '"' + _letters(token).replace("\\", "\\\\").replace('"', '\\"') + '"'  # no letter is a control character


def _is_base64(text: bytes) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return True
