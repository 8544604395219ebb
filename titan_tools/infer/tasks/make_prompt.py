"""A prompt as the model shall see it: behind the begin-of-text token or in its chat template, in tokens that fit."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from converters.errors import ConfigError
from converters.names import HF_GENERATION_CONFIG
from titan_tools.console import count
from titan_tools.infer.task import Work
from titan_tools.infer.text.chat_tokens import encode_chat
from titan_tools.infer.text.prompts import FROM_BOS, Prompt, what_is_missing
from titan_tools.infer.text.special_tokens import is_nothing_else
from trainer.data.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 128
# A text that gives more than twice the context in tokens is refused, or cut, by a part of it: 10 MB need not be read
_FAR_TOO_LONG, _CHARS_PER_TOKEN = 2, 4
_SHORT_CHARS = 100_000  # of a text that may be encoded once more, to see what else it could have meant
_LEAST_PROMPT = 2  # that --truncate left may leave: begin-of-text and one token


def make_prompt(work: Work, id: str | int, text: str) -> Prompt:
    """`text` behind the begin-of-text token or, in a chat, as what the user says.

    Raises ConfigError where there is nothing in it, or more than fits.
    """
    if missing := what_is_missing(text, from_bos=work.request.from_bos):
        raise ConfigError(f"the prompt {missing}", tries=[FROM_BOS] if work.template is None else [])
    if work.template is not None:
        return _chat_prompt(work, id, [{"role": "user", "content": text}], text)
    return _plain_prompt(work, id, text)


def _plain_prompt(work: Work, id: str | int, text: str) -> Prompt:
    request, tokenizer, context = work.request, work.vocabulary.tokenizer, work.args.max_seq_len
    if not request.special_tokens and _is_only_special(tokenizer, text):
        raise ConfigError(
            f"the prompt {text.strip()[:60]!r} is made of special tokens alone, and in a prompt they are text",
            tries=["--special-tokens, to read them as tokens", '--prompt "" --from-bos'],
        )
    cut, num_kept = request.truncate == "left", len(work.vocabulary.prefix)
    ids, is_all = _encode_up_to(
        tokenizer, text, num_tokens=_FAR_TOO_LONG * context, special=request.special_tokens, from_end=cut
    )
    ids = work.vocabulary.after_prefix(ids) or [*work.vocabulary.begin]  # --special-tokens may have brought a prefix
    if not ids:
        raise ConfigError("there is nothing to begin with: this tokenizer has no begin-of-text token")
    num_lost = max(0, len(ids) - _room_when_cut(work)) if cut else 0
    if num_lost:
        ids = [*ids[:num_kept], *ids[num_kept + num_lost :]]
    lost = ("" if is_all else "at least ") + count(num_lost, "token") if num_lost else ""
    prompt = Prompt(id, text, ids, lost)
    new_tokens_that_fit(prompt, work, is_all=is_all or cut)
    return prompt


def make_conversation(work: Work, id: str | int, messages: Sequence[Mapping[str, str]]) -> Prompt:
    """Messages (role, content) in the chat template; the prompt's text is what the template makes of them.

    `--system` stands before messages that bring no system message. Raises ConfigError where they do not fit.
    """
    return _chat_prompt(work, id, messages, None)


def _chat_prompt(work: Work, id: str | int, messages: Sequence[Mapping[str, str]], text: str | None) -> Prompt:
    """With --truncate left whole messages go, oldest first, so that what is left still begins with a user's."""
    request, context = work.request, work.args.max_seq_len
    if request.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": request.system}, *messages]
    for message in messages:
        _refuse_far_too_long(work, message["content"])
    system = [m for m in messages[:1] if m["role"] == "system"]
    starts = [i for i, m in enumerate(messages) if m["role"] == "user" and i > len(system)]

    def tokens_from(first: int) -> list[int]:
        return _encode_chat(work, [*system, *messages[first:]])

    tokens = _encode_chat(work, messages)
    num_whole = len(tokens)
    if request.truncate == "left" and num_whole > (room := _room_when_cut(work)) and starts:
        first = bisect_left(starts, True, key=lambda i: len(tokens_from(i)) <= room)
        first = min(first, len(starts) - 1)  # where none leaves so much, the last may still leave enough
        tokens, messages = tokens_from(starts[first]), [*system, *messages[starts[first] :]]
    text = work.template.render(messages) if text is None else text
    lost = count(num_whole - len(tokens), "token") if len(tokens) < num_whole else ""
    prompt = Prompt(id, text, tokens, lost)
    is_too_long = len(tokens) + (request.max_new_tokens or 1) > context
    shortest = len(tokens_from(starts[-1])) if is_too_long and starts else None
    new_tokens_that_fit(prompt, work, shortest=shortest)
    return prompt


def _encode_chat(work: Work, messages: Sequence[Mapping[str, str]]) -> list[int]:
    return encode_chat(work.template, work.vocabulary.tokenizer, messages)


def notes_on(work: Work, prompt: Prompt) -> list[str]:
    """What a person should know of how a prompt was read."""
    notes = []
    if prompt.lost:
        notes.append(f"the prompt lost {prompt.lost} of its beginning (--truncate left), {len(prompt.tokens):,} stay")
    tokenizer, is_text = work.vocabulary.tokenizer, not (work.request.special_tokens or work.template)
    if is_text and len(prompt.text) <= _SHORT_CHARS:
        plain, special = (tokenizer.encode(prompt.text, special=asked) for asked in (False, True))
        if plain != special:
            notes.append("special tokens written in the prompt were read as text; --special-tokens reads them as such")
    return notes


def new_tokens_that_fit(
    prompt: Prompt, work: Work, *, is_all: bool = True, shortest: int | None = _LEAST_PROMPT
) -> int:
    """How many tokens to generate: as asked, else 128 or what the context leaves. Raises ConfigError if too many.

    Where a generation config has a max_length, up to that length.

    `is_all`: the prompt's tokens are all that its text gives. `shortest`: tokens that --truncate left leaves of it at
    the least, None where it can leave none out.
    """
    max_new_tokens, max_length, context = work.request.max_new_tokens, work.request.max_length, work.args.max_seq_len
    num_prompt = len(prompt.tokens)
    if max_length is not None and num_prompt >= max_length:
        raise ConfigError(
            f"{num_prompt:,} prompt tokens leave none of the max_length {max_length:,} of {HF_GENERATION_CONFIG}",
            tries=["--max-new-tokens N, which takes its place"],
        )
    room = context - num_prompt
    if room < 1 or (max_new_tokens or 1) > room:
        asked = f" and {max_new_tokens:,} new ones" if max_new_tokens else ""
        many = f"{num_prompt:,}" if is_all else f"more than {num_prompt:,}"
        tries = [f"--max-new-tokens {room}"] if room > 0 else []
        if not prompt.lost and shortest is not None and shortest + (max_new_tokens or 1) <= context:
            tries.append("--truncate left, which drops the beginning of a prompt that is too long")
        raise ConfigError(
            f"{many} prompt tokens{asked} do not fit the model's context of {context:,} tokens",
            hint=f"at most {room:,} new tokens fit behind this prompt" if room > 0 else "the prompt itself is too long",
            tries=tries,
        )
    if max_length is not None:
        return min(max_length - num_prompt, room)
    return max_new_tokens or min(DEFAULT_NEW_TOKENS, room)


def _room_when_cut(work: Work) -> int:
    """Tokens that --truncate left leaves of a prompt: what follows needs its place, of which 128 at most are assumed.

    Raises ConfigError where there is none for a prompt.
    """
    asked, context = work.request.max_new_tokens, work.args.max_seq_len
    room = context - (asked or min(DEFAULT_NEW_TOKENS, context // 4))
    if room < _LEAST_PROMPT:
        raise ConfigError(
            f"{asked:,} new tokens leave no place for a prompt in the model's context of {context:,} tokens",
            tries=[f"--max-new-tokens {context // 2}"],
        )
    return room


def _encode_up_to(
    tokenizer: Tokenizer, text: str, *, num_tokens: int, special: bool = False, from_end: bool = False
) -> tuple[list[int], bool]:
    """Ids of the text; of one that has more than `num_tokens`, those of its beginning or end. And whether it is all.

    Where the part was cut off, a token or two may differ from the whole text's: what is used lies far from there.
    """
    num_chars = _CHARS_PER_TOKEN * num_tokens
    while num_chars < len(text):
        ids = tokenizer.encode(text[-num_chars:] if from_end else text[:num_chars], special=special)
        if len(ids) > num_tokens:
            return ids, False
        num_chars *= 4
    return tokenizer.encode(text, special=special), True


def _refuse_far_too_long(work: Work, content: str) -> None:
    context = work.args.max_seq_len
    if len(content) <= _CHARS_PER_TOKEN * _FAR_TOO_LONG * context:  # the template's text will tell
        return
    ids, is_all = _encode_up_to(work.vocabulary.tokenizer, content, num_tokens=_FAR_TOO_LONG * context)
    if not is_all:
        raise ConfigError(
            f"a message of more than {len(ids):,} tokens does not fit the model's context of {context:,} tokens"
        )


def _is_only_special(tokenizer: Tokenizer, text: str) -> bool:
    """Whether special tokens, read as such, would be all that a text is."""
    if tokenizer.special_names is not None:
        return is_nothing_else(text, tokenizer.special_names)
    ids = tokenizer.encode(text.strip()[:_SHORT_CHARS], special=True)
    return all(tokenizer.encode(piece) != [id] for piece, id in ((tokenizer.decode([id]), id) for id in ids))
