"""The tokenizer for torchtune: the file of a checkpoint that it opens, and the special tokens that it needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.common.names import TIKTOKEN_MODEL, TOKENIZER_JSON, TORCHTUNE_SPECIAL_TOKENS
from converters.model.model_info import ModelInfo
from converters.store.json_file import read_json, write_json
from converters.tokenizers.tiktoken_from_json import ranks_of_tokenizer_json, write_ranks
from converters.tokenizers.tiktoken_model import looks_like_tiktoken, read_ranks, require_of_llama, special_tokens_after
from converters.torchtune.recipe import VERSION

# What torchtune's Llama 3 tokenizer looks up. The first eight, in the order of Meta's ids, go through the model; of the
# last two a text has none.
_NEEDED = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|step_id|>",
    "<|image|>",
)
_NUM_SEEN = 8
_LLAMA3 = "torchtune.models.llama3.llama3_tokenizer"
_WITHOUT = "to export weights alone, convert to hf or meta: torchtune reads both"
_TRIES = ("--model-from FOLDER, a folder with the model's config and its tokenizer.model",)
_RELEASED = (128000, 128256)  # ranks and vocabulary of Meta's releases, whose ids torchtune has built in


@dataclass(frozen=True, slots=True)
class TorchtuneTokenizer:
    """The tokenizer section of a recipe, and the file of special tokens that it needs, if any."""

    component: str
    special_tokens: Mapping[str, int] | None = None  # None: those built into torchtune
    ranks: Mapping[bytes, int] | None = None  # made of a tokenizer.json, which torchtune cannot open

    def section(self, folder: Path) -> dict[str, Any]:
        """The recipe's section, for files in `folder`."""
        section = {"_component_": self.component, "path": str(folder / TIKTOKEN_MODEL)}
        if self.special_tokens is not None:
            section["special_tokens_path"] = str(folder / TORCHTUNE_SPECIAL_TOKENS)
        return section

    def write(self, folder: Path) -> list[str]:
        """Write the files that are not copied. Returns their names."""
        written = []
        if self.ranks is not None:
            write_ranks(folder / TIKTOKEN_MODEL, self.ranks)
            written.append(TIKTOKEN_MODEL)
        if self.special_tokens is not None:
            tokens = [{"id": number, "content": token} for token, number in self.special_tokens.items()]
            write_json(folder / TORCHTUNE_SPECIAL_TOKENS, {"added_tokens": tokens})
            written.append(TORCHTUNE_SPECIAL_TOKENS)
        return written


def find_tokenizer(info: ModelInfo) -> TorchtuneTokenizer:
    """The checkpoint's tokenizer. Raises CheckpointError or UnsupportedError if torchtune can open none."""
    path, in_json = info.assets.get(TIKTOKEN_MODEL), info.assets.get(TOKENIZER_JSON)
    if path is not None:
        if not looks_like_tiktoken(path):
            return TorchtuneTokenizer("torchtune.models.llama2.llama2_tokenizer")  # SentencePiece
        ranks: Mapping[bytes, int] = read_ranks(path)
    elif in_json is not None:
        ranks = _ranks_of(in_json)
    else:
        raise CheckpointError(
            "the checkpoint has no tokenizer, and torchtune fine-tunes on text", hint=_WITHOUT, tries=_TRIES
        )
    special_tokens = None
    if len(ranks) != _RELEASED[0] or info.decoder.vocab_size < _RELEASED[1]:
        special_tokens = _special_tokens(info, len(ranks))
    return TorchtuneTokenizer(_LLAMA3, special_tokens, ranks if path is None else None)


def _ranks_of(tokenizer_json: Path) -> Mapping[bytes, int]:
    try:
        return ranks_of_tokenizer_json(tokenizer_json, vocab_size=None)
    except UnsupportedError as error:
        hint = f"torchtune {VERSION} opens only a tokenizer.model; {_WITHOUT}"
        raise UnsupportedError(error.message, hint=hint, tries=_TRIES) from None


def _special_tokens(info: ModelInfo, num_ranks: int) -> dict[str, int]:
    """The checkpoint's own special tokens and, in free rows of the embedding, those it lacks."""
    vocab_size = info.decoder.vocab_size
    if TOKENIZER_JSON in info.assets:
        listed = read_json(info.assets[TOKENIZER_JSON]).get("added_tokens") or []
        tokens = {token["content"]: token["id"] for token in listed if token["id"] >= num_ranks}
    else:
        require_of_llama(info.assets[TIKTOKEN_MODEL], num_ranks)
        tokens = {t: num_ranks + i for i, t in enumerate(special_tokens_after(num_ranks, vocab_size=vocab_size))}
    first_free = max([num_ranks - 1, *tokens.values()]) + 1
    lacking = [token for token in _NEEDED if token not in tokens]
    tokens |= {token: first_free + index for index, token in enumerate(lacking)}
    out_of_range = [token for token in _NEEDED[:_NUM_SEEN] if tokens[token] >= vocab_size]
    if out_of_range:
        raise UnsupportedError(
            f"a vocabulary of {vocab_size} has no room for tokens that torchtune's chat format needs:"
            + list_offenders(out_of_range),
            hint=f"its tokenizer has {num_ranks} other tokens: is it the one of this model?",
        )
    return tokens
