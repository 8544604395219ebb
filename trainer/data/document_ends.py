"""The token that ends a document, for masks that are made of it. Torch-free."""

from dataclasses import replace
from pathlib import Path

from converters.common.errors import DataError
from converters.tokenizers.tokenizer import load_tokenizer
from trainer.data.sample import DocumentRules
from trainer.data.text_index import refuse_no_tokenizer


def with_end_token(rules: DocumentRules, tokenizer: Path) -> DocumentRules:
    """The rules with the end token of a tokenizer, if they need it. Raises DataError if it names none."""
    if rules.mask != "eos":
        return rules
    refuse_no_tokenizer("training.document_mask = eos", tokenizer)
    if (end := load_tokenizer(tokenizer).ends.end) is None:
        raise DataError(
            f"{tokenizer}: the tokenizer names no end token, so training.document_mask = eos finds no document's end",
            tries=["--training.document_mask offsets"],
        )
    return replace(rules, end_id=end)
