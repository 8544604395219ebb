"""Generation from Python: load a checkpoint of any format in this process and complete prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from converters.common.errors import ConfigError
from converters.source.weights import open_native
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Completion, generate
from titan_tools.infer.decoding.likelihood import Likelihood
from titan_tools.infer.decoding.sampling import Sampling, check_logprobs, check_sampling
from titan_tools.infer.find import find_checkpoints
from titan_tools.infer.loading import is_damaged, load_weights, prepare_work
from titan_tools.infer.model.load import SlicedModel
from titan_tools.infer.ranks import TPRanks, own_device
from titan_tools.infer.request import Request
from titan_tools.infer.task import Work, generation_settings
from titan_tools.infer.tasks.chat import DEFAULT_CONTEXT
from titan_tools.infer.tasks.one_prompt import make_conversation, make_prompt, new_tokens_that_fit
from titan_tools.infer.tasks.score import TextScore, score_texts, tokenize_text
from titan_tools.infer.text.chat_template import read_template
from titan_tools.infer.text.prompts import Prompt


class Generator:
    """A loaded checkpoint that completes prompts; made by `load_generator`.

    The cache keeps the last sequence, so that a prompt with the same beginning is not computed again.
    """

    def __init__(self, work: Work, model: SlicedModel, *, context: int):
        self._work, self.context = work, context
        self._engine = Engine(model, rows=1, room=context, compile=work.request.compile)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, framed as transformers' tokenizer does; special tokens are read as text."""
        vocabulary = self._work.vocabulary
        return vocabulary.framed(vocabulary.tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._work.vocabulary.decode(list(tokens))

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """Complete a text, a list of tokens, or messages ({"role": …, "content": …}) in the chat template.

        The options are those of `titan infer`; by default decoding is greedy, up to 128 new tokens. `on_text` is called
        with each piece of text as soon as it is final. Raises ConfigError for invalid options and for a prompt that
        does not fit the context, CheckpointError for messages without a chat template.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        check_sampling(sampling, vocab_size=self._work.args.vocab_size)
        check_logprobs(logprobs, vocab_size=self._work.args.vocab_size)
        if "" in stop or (max_new_tokens is not None and max_new_tokens < 1):
            raise ConfigError("stop strings must not be empty, and max_new_tokens must be at least 1")
        request = replace(
            self._work.request,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            stop=tuple(stop),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        work = replace(self._work, request=request)
        if isinstance(prompt, str):
            tokenized = make_prompt(work, "0", prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            work = replace(work, template=read_template(work.tokenizer_folder))
            tokenized = make_conversation(work, "0", cast(Sequence[Mapping[str, str]], prompt))
        else:
            tokenized = Prompt("0", "", self._checked(prompt))
        num_new = new_tokens_that_fit(tokenized, work, shortest=None)
        settings = generation_settings(work, max_new_tokens=num_new)
        (completion,) = generate(self._engine, [tokenized], settings, work.vocabulary, on_text=on_text)
        return completion

    def score(self, text: str, *, completion: str | None = None, num_top: int | None = None) -> TextScore:
        """The log-likelihood of a text, or of `completion` after `text`, as of `titan infer --score`.

        `num_top`: also the log-probability of each token, with that many of the likeliest tokens. Raises ConfigError
        for a text without a token to score.
        """
        scored = tokenize_text(self._work, id="0", prompt=text, completion=completion)
        likelihood = Likelihood(self._engine, context=self.context, vocab_size=self._work.args.vocab_size)
        (score,) = score_texts(likelihood, [scored], num_top=num_top)
        return score

    def _checked(self, tokens: Sequence[Any]) -> list[int]:
        vocab_size = self._work.args.vocab_size
        if not tokens or not all(isinstance(token, int) and 0 <= token < vocab_size for token in tokens):
            raise ConfigError(f"a prompt of tokens must hold at least one, all from 0 to {vocab_size - 1}")
        return list(tokens)


def load_generator(request: Request, *, device: str | None = None, context: int | None = None) -> Generator:
    """Load the checkpoint of a request; `device` and `context` are those of `titan_tools.api.load_for_inference`.

    Raises CheckpointError if the checkpoint cannot be read, ConfigError if the options do not fit it, and OutOfMemory.
    """
    ranks = TPRanks(1, 0, own_device(1) if device is None else torch.device(device))
    for found in find_checkpoints(request.checkpoint):
        with open_native(found.place, select=request.select, model_from=request.model_from) as weights:
            work = prepare_work(request, weights)
            longest = work.args.max_seq_len
            if context is not None and not 2 <= context <= longest:
                raise ConfigError(f"context is {context}; it must be from 2 to the model's {longest} tokens")
            if is_damaged(found, weights, ranks):
                continue
            model = load_weights(work, weights, ranks, rows=1)
        room = context or min(longest, DEFAULT_CONTEXT)
        work = replace(work, args=replace(work.args, max_seq_len=room))
        return Generator(work, model, context=room)
    raise AssertionError("find_checkpoints raises where no step is left")
