"""Train a small byte-level BPE tokenizer, and write it in the forms that Llama's tools and transformers read."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path

from converters.errors import DataError
from converters.names import HF_GENERATION_CONFIG, TIKTOKEN_MODEL, TOKENIZER_CONFIG, TOKENIZER_JSON
from trainer.data.llama3_text import BOS, EOS, PATTERN, SPECIAL_TOKENS

SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)  # single bytes, no merge
_MAX_CONTEXT = 131072  # Llama 3.1's; only told to transformers


def train_ranks(texts: Iterable[str], *, vocab_size: int) -> list[bytes]:
    """Tokens by rank: 256 bytes, then merges, so many that with the special tokens there are exactly `vocab_size`.

    Raises DataError where the texts do not give that many.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCAB:
        raise DataError(f"a vocabulary of {vocab_size} cannot hold 256 bytes and {len(SPECIAL_TOKENS)} special tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizers(Regex(PATTERN)))
    num_ranks = vocab_size - len(SPECIAL_TOKENS)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=num_ranks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != num_ranks:
        most = found + len(SPECIAL_TOKENS)
        raise DataError(
            f"the text is too small or too uniform for a vocabulary of {vocab_size}: it gives {most}",
            tries=[f"--vocab-size {most}"],
        )
    bytes_of = _bytes_of_letters()
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes(bytes_of[letter] for letter in token) for token, _ in by_id]


def write_tokenizer(folder: Path, ranks: list[bytes]) -> None:
    """Write tokenizer.model (tiktoken), tokenizer.json with equal ids, and what transformers wants beside them."""
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks))
    (folder / TIKTOKEN_MODEL).write_bytes(b"".join(lines))
    (folder / TOKENIZER_JSON).write_text(_tokenizer_json(ranks), "utf-8")
    ids = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": _MAX_CONTEXT,
    }
    _write_json(folder / TOKENIZER_CONFIG, config)
    _write_json(folder / HF_GENERATION_CONFIG, {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS]})


def _tokenizer_json(ranks: list[bytes]) -> str:
    """The `tokenizers` form: a merge for every way to split a token into two lower ones, in the order of the ranks.

    tiktoken merges whatever pair makes the lowest rank, not only the pair that training met first; so must this.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    letter_of = {byte: letter for letter, byte in _bytes_of_letters().items()}
    rank_of = {token: rank for rank, token in enumerate(ranks)}

    def spell(token: bytes) -> str:
        return "".join(letter_of[byte] for byte in token)

    merges = []
    for token in ranks:
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(rank_of[left], rank_of[right]) for left, right in splits if left in rank_of and right in rank_of]
        merges += [(spell(ranks[left]), spell(ranks[right])) for left, right in sorted(known)]
    vocab = {spell(token): rank for rank, token in enumerate(ranks)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizers(Regex(PATTERN)))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL_TOKENS])
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[bos]),
        ]
    )
    return tokenizer.to_str(pretty=True)


def _pre_tokenizers(pattern) -> list:
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.Split(pattern, behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _bytes_of_letters() -> dict[str, int]:
    """GPT-2's way of writing any byte as one printable letter: printable ones stand for themselves, others move up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
