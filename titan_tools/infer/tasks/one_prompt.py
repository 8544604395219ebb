"""Prompts as the model reads them, and the completion of a single one: streamed text, or one JSON object."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from converters.common.errors import ConfigError
from converters.common.names import HF_GENERATION_CONFIG
from converters.tokenizers.special_text import is_only_special
from converters.tokenizers.tokenizer import Tokenizer
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Completion, GenerationSettings, Timings, generate
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.report import describe, result_of, stats_of
from titan_tools.infer.task import Work, generation_settings, num_rows
from titan_tools.infer.tasks.results import InOrder
from titan_tools.infer.text.channels import answer_in_template
from titan_tools.infer.text.chat_tokens import encode_chat
from titan_tools.infer.text.prompts import FROM_BOS, Prompt, why_empty
from titan_tools.terminal.console import count, note, print_json, stream

DEFAULT_NEW_TOKENS = 128
# A text with more than twice the context in tokens is rejected, or truncated, without tokenizing all of it
_FAR_TOO_LONG, _CHARS_PER_TOKEN = 2, 4
_SHORT_CHARS = 100_000  # of a text that may be tokenized twice, to see what special tokens would change
_LEAST_PROMPT = 2  # tokens that --truncate left keeps: begin-of-text and one more


def make_prompt(work: Work, id: str | int, text: str) -> Prompt:
    """`text` after the begin-of-text token or, with --chat, as a user's message in the chat template.

    Raises ConfigError if it is empty or does not fit the context.
    """
    if problem := why_empty(text, from_bos=work.request.from_bos):
        raise ConfigError(f"the prompt {problem}", tries=[FROM_BOS] if work.template is None else [])
    if work.template is not None:
        return make_conversation(work, id, [{"role": "user", "content": text}], text=text)
    return _plain_prompt(work, id, text)


def _plain_prompt(work: Work, id: str | int, text: str) -> Prompt:
    request, tokenizer, context = work.request, work.vocabulary.tokenizer, work.args.max_seq_len
    if not request.special_tokens and _has_only_special_tokens(tokenizer, text):
        raise ConfigError(
            f"the prompt {text.strip()[:60]!r} consists of special tokens only, and in a prompt they are text",
            tries=["--special-tokens, to read them as tokens", '--prompt "" --from-bos'],
        )
    truncates, num_kept = request.truncate == "left", len(work.vocabulary.prefix)
    ids, is_all = _encode_up_to(
        tokenizer, text, num_tokens=_FAR_TOO_LONG * context, special=request.special_tokens, from_end=truncates
    )
    ids = work.vocabulary.framed(ids) if text else [*work.vocabulary.begin]
    if not ids:
        nothing = "there is nothing to begin with: this tokenizer has no begin-of-text token"
        raise ConfigError("this tokenizer has no token for any character of the prompt" if text else nothing)
    num_lost = max(0, len(ids) - _room_when_truncated(work)) if truncates else 0
    if num_lost:
        ids = [*ids[:num_kept], *ids[num_kept + num_lost :]]
    lost = ("" if is_all else "at least ") + count(num_lost, "token") if num_lost else ""
    prompt = Prompt(id, text, ids, lost)
    new_tokens_that_fit(prompt, work, is_all=is_all or truncates)
    return prompt


def make_conversation(
    work: Work, id: str | int, messages: Sequence[Mapping[str, str]], *, text: str | None = None
) -> Prompt:
    """Messages (role, content) in the chat template; `text`: the prompt's, by default the rendered template.

    An assistant's may be what a model generated in channels. --system is added to messages without a system message;
    --truncate left drops whole messages, oldest first, so that the rest still begins with a user's. Raises
    ConfigError if they do not fit the context.
    """
    request, template, context = work.request, work.template, work.args.max_seq_len
    assert template is not None
    if request.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": request.system}, *messages]
    for message in messages:
        _check_not_far_too_long(work, message["content"])
    messages = [
        {**m, **answer_in_template(template.source, m["content"])}
        if m["role"] == "assistant" and "thinking" not in m
        else m
        for m in messages
    ]
    system = [m for m in messages[:1] if m["role"] == "system"]
    starts = [i for i, m in enumerate(messages) if m["role"] == "user" and i > len(system)]

    def tokens_from(first: int) -> list[int]:
        return encode_chat(template, work.vocabulary.tokenizer, [*system, *messages[first:]])

    tokens = encode_chat(template, work.vocabulary.tokenizer, messages)
    num_whole = len(tokens)
    if request.truncate == "left" and num_whole > (room := _room_when_truncated(work)) and starts:
        first = bisect_left(starts, True, key=lambda i: len(tokens_from(i)) <= room)
        first = min(first, len(starts) - 1)  # where none leaves so much room, the last may still leave enough
        tokens, messages = tokens_from(starts[first]), [*system, *messages[starts[first] :]]
    text = template.render(messages) if text is None else text
    lost = count(num_whole - len(tokens), "token") if len(tokens) < num_whole else ""
    prompt = Prompt(id, text, tokens, lost)
    is_too_long = len(tokens) + (request.max_new_tokens or 1) > context
    shortest = len(tokens_from(starts[-1])) if is_too_long and starts else None
    new_tokens_that_fit(prompt, work, shortest=shortest)
    return prompt


def new_tokens_that_fit(
    prompt: Prompt, work: Work, *, is_all: bool = True, shortest: int | None = _LEAST_PROMPT
) -> int:
    """The number of new tokens: as requested, else up to max_length of a generation config, else 128, if they fit.

    Raises ConfigError if they do not fit. `is_all`: the prompt's tokens are those of its whole text. `shortest`: the
    fewest tokens that --truncate left can leave of it, None if it can leave none out.
    """
    max_new_tokens, max_length, context = work.request.max_new_tokens, work.request.max_length, work.args.max_seq_len
    num_prompt = len(prompt.tokens)
    if max_length is not None and num_prompt >= max_length:
        raise ConfigError(
            f"{num_prompt:,} prompt tokens leave none of the max_length {max_length:,} of {HF_GENERATION_CONFIG}",
            tries=["--max-new-tokens N, which overrides it"],
        )
    room = context - num_prompt
    if room < 1 or (max_new_tokens or 1) > room:
        new = f" and {max_new_tokens:,} new ones" if max_new_tokens else ""
        many = f"{num_prompt:,}" if is_all else f"more than {num_prompt:,}"
        tries = [f"--max-new-tokens {room}"] if room > 0 else []
        if not prompt.lost and shortest is not None and shortest + (max_new_tokens or 1) <= context:
            tries.append("--truncate left, which drops the beginning of a prompt that is too long")
        raise ConfigError(
            f"{many} prompt tokens{new} do not fit the model's context of {context:,} tokens",
            hint=f"at most {room:,} new tokens fit behind this prompt" if room > 0 else "the prompt itself is too long",
            tries=tries,
        )
    if max_length is not None:
        return min(max_length - num_prompt, room)
    return max_new_tokens or min(DEFAULT_NEW_TOKENS, room)


def _room_when_truncated(work: Work) -> int:
    """Tokens that --truncate left leaves of a prompt: all but --max-new-tokens, by default 128 or a quarter.

    Raises ConfigError if no prompt fits.
    """
    max_new_tokens, context = work.request.max_new_tokens, work.args.max_seq_len
    room = context - (max_new_tokens or min(DEFAULT_NEW_TOKENS, context // 4))
    if room < _LEAST_PROMPT:
        raise ConfigError(
            f"{max_new_tokens:,} new tokens leave no room for a prompt in the model's context of {context:,} tokens",
            tries=[f"--max-new-tokens {context // 2}"],
        )
    return room


def _encode_up_to(
    tokenizer: Tokenizer, text: str, *, num_tokens: int, special: bool = False, from_end: bool = False
) -> tuple[list[int], bool]:
    """The tokens of a text, of a text with more than `num_tokens` those of its beginning or end; and if they are all.

    Next to the cut a token or two may differ from those of the whole text; no caller uses tokens there.
    """
    num_chars = _CHARS_PER_TOKEN * num_tokens
    while num_chars < len(text):
        ids = tokenizer.encode(text[-num_chars:] if from_end else text[:num_chars], special=special)
        if len(ids) > num_tokens:
            return ids, False
        num_chars *= 4
    return tokenizer.encode(text, special=special), True


def _check_not_far_too_long(work: Work, content: str) -> None:
    context = work.args.max_seq_len
    if len(content) <= _CHARS_PER_TOKEN * _FAR_TOO_LONG * context:  # the rendered text is checked anyway
        return
    ids, is_all = _encode_up_to(work.vocabulary.tokenizer, content, num_tokens=_FAR_TOO_LONG * context)
    if not is_all:
        raise ConfigError(
            f"a message of more than {len(ids):,} tokens does not fit the model's context of {context:,} tokens"
        )


def _has_only_special_tokens(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text, if its special tokens were read as tokens, would consist of them only."""
    if tokenizer.special_names is not None:
        return is_only_special(text, tokenizer.special_names)
    ids, plain = (tokenizer.encode(text.strip()[:_SHORT_CHARS], special=flag) for flag in (True, False))
    return ids != plain and tokenizer.special_ids.issuperset(ids)


@dataclass(frozen=True, slots=True)
class PromptTask:
    """Completes one prompt; see task.py."""

    work: Work
    prompt: Prompt
    settings: GenerationSettings
    rows: int
    room: int

    @property
    def least_tokens(self) -> int:
        return len(self.prompt.tokens)

    def run(self, engine: Engine | None, ranks: TPRanks) -> None:
        assert engine is not None
        as_json, samples = self.work.request.as_json, self.settings.samples
        prints_text = ranks.is_first and not as_json
        if ranks.is_first:
            self._print_notes()
        timings, started = Timings(), perf_counter()
        ordered: InOrder[Completion] = InOrder([(self.prompt.id, sample) for sample in range(samples)])
        completions = []
        for completion in generate(
            engine,
            [self.prompt],
            self.settings,
            self.work.vocabulary,
            timings=timings,
            on_text=stream if prints_text and samples == 1 else None,
        ):
            for ready in ordered.put((self.prompt.id, completion.sample), completion):
                completions.append(ready)
                if prints_text:
                    stream("\n" if samples == 1 else f"--- {ready.sample}\n{ready.text}\n")
        stats = stats_of(timings, engine, ranks, self.work, secs=perf_counter() - started)
        if prints_text:
            note(describe(stats, num=samples))
        elif ranks.is_first:
            print_json({"results": [result_of(one, samples=samples) for one in completions], "stats": stats})

    def _print_notes(self) -> None:
        """How the prompt was read, where that may be unexpected."""
        prompt, tokenizer = self.prompt, self.work.vocabulary.tokenizer
        if prompt.lost:
            note(f"the prompt lost {prompt.lost} of its beginning (--truncate left), {len(prompt.tokens):,} remain")
        if (suffix := self.work.vocabulary.suffix) and self.work.template is None:
            note(f"the prompt ends with {tokenizer.decode(suffix)}, which this tokenizer adds, as in transformers")
        is_text = not (self.work.request.special_tokens or self.work.template)
        if is_text and len(prompt.text) <= _SHORT_CHARS:
            plain, special = (tokenizer.encode(prompt.text, special=flag) for flag in (False, True))
            if plain != special:
                note("special tokens written in the prompt were read as text; --special-tokens reads them as tokens")


def prepare_one(work: Work) -> PromptTask:
    """The prompt of `work.request.text`, which must fit the model's context."""
    request = work.request
    assert request.text is not None
    prompt = make_prompt(work, "0", request.text)
    num_new = new_tokens_that_fit(prompt, work)
    settings, rows = generation_settings(work, max_new_tokens=num_new), num_rows(request, request.samples)
    return PromptTask(work, prompt, settings, rows, len(prompt.tokens) + num_new)
