"""Train a small byte-level BPE tokenizer and write it for Llama's tools and transformers."""

import base64
from collections.abc import Iterable
from pathlib import Path

from converters.common.errors import DataError
from converters.common.names import HF_GENERATION_CONFIG, TIKTOKEN_MODEL
from converters.store.json_file import write_json
from converters.tokenizers.tiktoken_model import BYTE_LETTERS, LLAMA3_PATTERN, write_hf_tokenizer

NUM_SPECIAL = 10  # Llama 3's named ones, which torchtune requires
_MAX_CONTEXT = 131072  # Llama 3.1's; for transformers only


def train_ranks(texts: Iterable[str], *, vocab_size: int) -> list[bytes]:
    """Tokens by rank: 256 bytes, then merges, so many that with the special tokens there are exactly `vocab_size`.

    Raises DataError if the texts do not give that many.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    num_ranks = vocab_size - NUM_SPECIAL
    if num_ranks < 256:
        raise DataError(f"a vocabulary of {vocab_size} cannot hold 256 bytes and {NUM_SPECIAL} special tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=num_ranks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != num_ranks:
        most = size + NUM_SPECIAL
        raise DataError(
            f"the text is too small or too uniform for a vocabulary of {vocab_size}: it gives {most}",
            tries=[f"--vocab-size {most}"],
        )
    byte_of = {letter: byte for byte, letter in BYTE_LETTERS.items()}
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes(byte_of[letter] for letter in token) for token, _ in by_id]


def write_tokenizer(folder: Path, ranks: list[bytes]) -> None:
    """Write tokenizer.model (tiktoken), tokenizer.json with equal ids, and the other files that transformers needs."""
    model = folder / TIKTOKEN_MODEL
    model.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)))
    write_hf_tokenizer(folder, model, vocab_size=len(ranks) + NUM_SPECIAL, max_seq_len=_MAX_CONTEXT)
    # the special tokens follow the ranks, begin and end of text first
    write_json(folder / HF_GENERATION_CONFIG, {"bos_token_id": len(ranks), "eos_token_id": len(ranks) + 1})
