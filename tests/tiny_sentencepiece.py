"""A small SentencePiece file as Llama 2 has one."""

from collections.abc import Iterable
from pathlib import Path

FOX = ("the quick brown fox jumps over the lazy dog",) * 20


def write_sentencepiece(path: Path, *, lines: Iterable[str] = FOX, vocab_size: int = 290) -> None:
    """BPE with the bytes to fall back on; text comes back as it was."""
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(path.with_suffix("")),
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        num_threads=1,
    )
    path.with_suffix(".vocab").unlink()
