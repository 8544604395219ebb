"""What makes a tokenizer a Llama 3 tokenizer besides its ranks: the pre-tokenizer's pattern and the special tokens."""

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"

SPECIAL_TOKENS = (
    BOS,
    EOS,
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)
"""The ten that torchtune wants all of; in a tokenizer of ours they follow the ranks in this order."""

_NUM_RELEASED_RANKS = 128000
_NUM_RELEASED_SPECIALS = 256


def special_tokens_after(num_ranks: int) -> dict[str, int]:
    """Special tokens of a `tokenizer.model` that comes alone: Meta's 256 after its 128,000 ranks, else our ten."""
    if num_ranks != _NUM_RELEASED_RANKS:
        return {name: num_ranks + i for i, name in enumerate(SPECIAL_TOKENS)}
    # Llama 3.1's list: two reserved tokens after the first two, and the other named ones where 3.0 had reserved ones
    named = [BOS, EOS, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", *SPECIAL_TOKENS[2:9]]
    num_reserved = _NUM_RELEASED_SPECIALS - len(named)
    named += [f"<|reserved_special_token_{2 + i}|>" for i in range(num_reserved)]
    return {name: num_ranks + i for i, name in enumerate(named)}
