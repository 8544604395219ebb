"""Which options of `titan infer` go together. All that do not are one error, before anything is read."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import NamedTuple

from converters.errors import ConfigError, list_offenders
from titan_tools.infer.decoding.sampling import check_sampling
from titan_tools.infer.request import Request
from titan_tools.infer.text.prompts import FROM_BOS, what_is_missing


class _Problem(NamedTuple):
    message: str
    tries: tuple[str, ...] = ()


def check_options(request: Request, *, is_settled: bool = True) -> None:
    """Raise ConfigError with everything in the request that has no meaning beside the rest of it.

    `is_settled`: false where a generation config is yet to say how tokens are chosen.
    """
    problems = list(_problems(request, is_settled=is_settled))
    try:
        if is_settled:
            check_sampling(request.sampling)
    except ConfigError as error:
        problems.append(_Problem(error.message, error.tries))
    if not problems:
        return
    message = problems[0].message
    if len(problems) > 1:
        message = f"{len(problems)} problems with these options:" + list_offenders(
            [problem.message for problem in problems]
        )
    raise ConfigError(message, tries=list(dict.fromkeys(line for problem in problems for line in problem.tries)))


def _problems(request: Request, *, is_settled: bool) -> Iterator[_Problem]:
    yield from _of_prompts(request)
    for name, text in (("--system", request.system), *(("--stop", stop) for stop in request.stop)):
        if wrong := _not_utf8(text or ""):
            yield _Problem(f"{name} is not UTF-8: {wrong}")
    if "" in request.stop:
        yield _Problem("--stop is empty, and every text ends with nothing", ('--stop "###"',))
    if is_settled and request.samples > 1 and request.sampling.temperature == 0 and not request.score:
        yield _Problem(
            f"--samples {request.samples} at temperature 0 would all be alike: give --temperature", ("--temperature 1",)
        )
    is_text = request.batch is None and not request.as_json
    if request.logprobs is not None and is_text and not is_conversation(request):
        yield _Problem("--logprobs has no place in plain text", ("--json",))
    if request.quantize and request.dtype == "float16":
        yield _Problem(
            "--quantize with --dtype float16: sums over 8-bit weights grow beyond 65504, where float16 ends",
            ("--dtype bfloat16",),
        )
    if request.score:
        yield from _without_meaning(_OF_GENERATION, request, "with --score, which makes no new tokens")
        yield from _without_meaning(("--batch-size",), request, "with --score, which reads one text at a time")
    if is_conversation(request):
        yield from _without_meaning(_OF_RESULTS, request, "in a conversation; give a prompt")
    elif request.context is not None and not request.score:
        yield _Problem("--context is of a conversation (--chat without a prompt), or of --score")
    if request.chat:
        yield from _without_meaning(_OF_PLAIN_TEXT, request, "in a chat, where the template brings the special tokens")
    elif request.system is not None:
        yield _Problem("--system is a message of a --chat", ("--chat",))


def _of_prompts(request: Request) -> Iterator[_Problem]:
    if request.text is None and request.batch is None and not is_conversation(request):
        or_chat = "" if request.score else "; or --chat"
        yield _Problem(
            f"give a prompt: --prompt TEXT, --prompt-file FILE, - for standard input, or --batch FILE{or_chat}",
            ('--prompt "" --from-bos',) if request.from_bos else (),
        )
    if request.text is not None and request.batch is not None:
        yield _Problem("--batch has prompts of its own: leave the other prompt out")
    elif request.text is not None and (missing := what_is_missing(request.text, from_bos=request.from_bos)):
        can_be_empty = not (request.chat or request.score)
        yield _Problem(f"the prompt {missing}", (FROM_BOS,) if can_be_empty else ('--prompt "Once upon a time"',))
    if request.batch is None:
        if request.out is not None:
            yield _Problem("--out is where the results of a --batch go", ("--batch FILE",))
        if request.batch_size is not None and request.samples == 1 and request.text is not None and not request.score:
            yield _Problem("--batch-size is of a --batch, or of --samples: there is one sequence here")


def is_conversation(request: Request) -> bool:
    """Whether a person is to be talked with: --chat, and no prompt."""
    return request.chat and request.text is None and request.batch is None and not request.score


_OF_GENERATION = (
    "--chat", "--max-new-tokens", "--stop", "--ignore-eos", "--temperature", "--top-k", "--top-p", "--min-p",
    "--repetition-penalty", "--generation-config", "--samples", "--truncate", "--from-bos", "--compile",
)  # fmt: skip
_OF_RESULTS = ("--json", "--samples", "--logprobs", "--truncate", "--batch-size")
_OF_PLAIN_TEXT = ("--from-bos", "--special-tokens")
_NAMES = {"as_json": "json"}  # of fields that are not named as their options


def _without_meaning(names: tuple[str, ...], request: Request, where: str) -> Iterator[_Problem]:
    given = _given(request)
    yield from (_Problem(f"{name} has no meaning {where}") for name in names if given[name])


def _given(request: Request) -> dict[str, bool]:
    """Whether an option has another value than its default, by its name."""
    return {
        f"--{_NAMES.get(field.name, field.name).replace('_', '-')}": getattr(record, field.name) != field.default
        for record in (request, request.sampling)
        for field in fields(record)
        if field.default is not MISSING
    }


def _not_utf8(text: str) -> str:
    """Which byte of an argument was none; Python hands such bytes on as lone surrogates."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte 0x{data[error.start]:02x} at offset {error.start}"
    return ""
