"""Tokenizers of each kind that model folders have, trained on a few lines."""

import base64
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import tiktoken
from sentencepiece import SentencePieceTrainer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

BEGIN, END, TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>"
LINES = [
    "the quick brown fox jumps over the lazy dog, 1234567890 times or more",
    "def main(arguments):\n    return arguments + 3.14  # it's what we'll do",
    "naïve café in Zürich, and 日本語テキスト here",
    "WE HAVE the lazy dogs don't we? They'll jump   again and again\n\n\tover",
] * 20
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(pattern: str | None, *, size: int = 400, lines: list[str] = LINES) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pattern == _LLAMA3))
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[])
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([BEGIN, END, TURN])
    return tokenizer


def _begins(tokenizer: Tokenizer) -> Tokenizer:
    special = [(BEGIN, tokenizer.token_to_id(BEGIN))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=special)
    return tokenizer


def _save(folder: Path, tokenizer: Tokenizer, **names: str) -> None:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def _llama3(folder: Path, *, lines: list[str] = LINES) -> None:
    _save(folder, _begins(_byte_level(_LLAMA3, lines=lines)), bos_token=BEGIN, eos_token=END)


def _qwen(folder: Path) -> None:
    tokenizer = _byte_level(_QWEN)
    tokenizer.normalizer = normalizers.NFC()
    _save(folder, tokenizer, eos_token=END)


def _gpt2(folder: Path) -> None:
    _save(folder, _byte_level(None), bos_token=BEGIN, eos_token=END)


def _word_piece(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    _save(folder, tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]")


def _unigram(folder: Path) -> None:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    _save(folder, tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _word_level(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    _save(folder, tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _tiktoken(folder: Path, *, lines: list[str] = LINES) -> None:
    """Meta's file: each token in base64, and its rank."""
    tokenizer = _byte_level(_LLAMA3, lines=lines)
    alphabet = _bytes_of_letters()
    added = tokenizer.get_added_tokens_decoder()
    ids = sorted((id, token) for token, id in tokenizer.get_vocab().items() if id not in added)
    tokens = [bytes(alphabet[letter] for letter in token) for _, token in ids]
    rows = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("".join(rows))


def _bytes_of_letters() -> dict[str, int]:
    """Which byte each letter of the byte-level alphabet stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _sentencepiece(folder: Path, *, kind: str) -> None:
    SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in LINES for line in text.splitlines() if line),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        num_threads=1,
    )
    (folder / "tokenizer.vocab").unlink()


def _llama2(folder: Path) -> None:
    """SentencePiece beside what transformers makes of it, as Llama 2's repositories have both."""
    _sentencepiece(folder, kind="bpe")
    LlamaTokenizer.from_pretrained(folder).save_pretrained(folder)


def _llama2_slow(folder: Path, *, kind: str, **changes: bool) -> None:
    """Without a tokenizer.json, as Llama 2's repositories began."""
    _sentencepiece(folder, kind=kind)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"add_bos_token": True, "legacy": False} | changes)
    )


def _slow(folder: Path) -> None:
    """vocab.json and merges.txt without a tokenizer.json, as Qwen's repositories began."""
    content = json.loads(_byte_level(_QWEN).to_str())
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in content["model"]["merges"]))
    tokens = {str(token["id"]): {**token, "content": token["content"]} for token in content["added_tokens"]}
    for token in tokens.values():
        del token["id"]
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": END, "added_tokens_decoder": tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _both(folder: Path) -> None:
    _llama3(folder)
    _tiktoken(folder)


def _disagreeing(folder: Path) -> None:
    _llama3(folder)
    _tiktoken(folder, lines=[line[::-1] for line in LINES])


KINDS: dict[str, Callable[[Path], None]] = {
    "byte-level BPE, Llama 3's": _llama3,
    "byte-level BPE, Qwen's": _qwen,
    "byte-level BPE, GPT-2's": _gpt2,
    "WordPiece": _word_piece,
    "Unigram": _unigram,
    "WordLevel": _word_level,
    "tiktoken alone": _tiktoken,
    "SentencePiece BPE alone": partial(_sentencepiece, kind="bpe"),
    "SentencePiece unigram alone": partial(_sentencepiece, kind="unigram"),
    "SentencePiece BPE, tokenizer_config.json": partial(_llama2_slow, kind="bpe"),
    "SentencePiece BPE, legacy": partial(_llama2_slow, kind="bpe", legacy=True),
    "SentencePiece BPE, no begin": partial(_llama2_slow, kind="bpe", add_bos_token=False),
    "SentencePiece BPE, with an end": partial(_llama2_slow, kind="bpe", add_eos_token=True),
    "SentencePiece unigram, tokenizer_config.json": partial(_llama2_slow, kind="unigram"),
    "both, Llama 2's": _llama2,
    "both, Llama 3's": _both,
    "both, which disagree": _disagreeing,
    "vocab.json and merges.txt": _slow,
    "none": lambda folder: None,
}


def ids_of(kind: str, folder: Path, texts: Sequence[str]) -> list[list[int]] | None:
    """The ids of `texts` as AutoTokenizer reads them; None where it opens no tokenizer.

    A tiktoken file that comes alone is Meta's, of which transformers knows no special tokens.
    """
    try:
        if kind == "tiktoken alone":
            rows = [row.split() for row in (folder / "tokenizer.model").read_text().splitlines()]
            ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
            special = {BEGIN: len(ranks), END: len(ranks) + 1}
            model = tiktoken.Encoding("meta", pat_str=_LLAMA3, mergeable_ranks=ranks, special_tokens=special)
            return [[special[BEGIN], *model.encode(text, allowed_special="all")] for text in texts]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return [tokenizer(text).input_ids for text in texts]
    except Exception:  # of whatever type, where there is nothing that it opens
        return None
