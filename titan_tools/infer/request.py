"""The options of one `titan infer` call: the record, how it is passed to ranks, and which options go together."""

import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path

from converters.common.errors import ConfigError, list_offenders
from converters.store.location import Location, locate
from titan_tools.infer.decoding.sampling import Sampling, check_sampling
from titan_tools.infer.text.prompts import FROM_BOS, why_empty


@dataclass(frozen=True, slots=True)
class Request:
    """One call: the command's options by their names. None is the default of the option's help."""

    checkpoint: Location
    sampling: Sampling
    # Prompts: one of the two, or neither for a conversation
    text: str | None = None
    batch: Path | None = None
    out: Path | None = None  # of a batch; None: standard output
    chat: bool = False  # prompts are user messages in the checkpoint's chat template
    system: str | None = None
    score: bool = False  # log-likelihood of the texts instead of completions
    generation_config: bool = False  # follow the checkpoint's, except for the options in `explicit`
    explicit: tuple[str, ...] = ()
    # Length
    max_length: int | None = None  # of prompt and new tokens together, from the generation config
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    context: int | None = None  # tokens of a conversation, or of a window with --score
    truncate: str | None = None  # "left": prompts that do not fit lose their beginning
    from_bos: bool = False  # an empty prompt is the begin-of-text token alone
    special_tokens: bool = False  # <|…|> in a prompt are tokens, not text
    # Output
    samples: int = 1
    logprobs: int | None = None
    as_json: bool = False
    # Hardware
    tp: int | None = None
    dtype: str | None = None
    quantize: str | None = None  # "int8", "float8" or "stored"
    compile: bool = False
    batch_size: int | None = None  # sequences that decode together
    select: str | None = None  # of a checkpoint with several models
    model_from: Location | None = None  # folder with the model's config and tokenizer
    ignore_memory: bool = False  # start even if weights and cache exceed the available memory
    # The time for the chat template: the first process's, since those of ranks could differ
    moment: datetime = field(default_factory=datetime.now)


_PLACES: dict[str, Callable[[str], Path | Location]] = {
    "checkpoint": locate, "batch": Path, "out": Path, "model_from": locate,
}  # fmt: skip


def save_request(request: Request, path: Path) -> None:
    """Write a request for `load_request`. Paths become absolute."""
    values = asdict(request)
    for name in _PLACES:
        if values[name] is not None:
            values[name] = str(locate(getattr(request, name)).absolute())
    values["moment"] = request.moment.isoformat()
    path.write_text(json.dumps(values), encoding="utf-8")


def load_request(path: Path) -> Request:
    """Read a request. Raises ConfigError for any other file: the option that names it is internal."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict) or values.keys() != {field.name for field in fields(Request)}:
        raise ConfigError(f"--request {path}: not a file that titan wrote for its ranks; leave the option out")
    for name, read in _PLACES.items():
        if values[name] is not None:
            values[name] = read(values[name])
    parsed = {"sampling": Sampling(**values["sampling"]), "moment": datetime.fromisoformat(values["moment"])}
    return Request(**values | parsed | {name: tuple(values[name]) for name in ("stop", "explicit")})


def check_options(request: Request, *, is_settled: bool = True) -> None:
    """Raise ConfigError with all options that do not go together, before anything is read.

    `is_settled`: False if sampling options may still come from a generation config.
    """
    problems = list(_problems(request, is_settled=is_settled))
    try:
        if is_settled:
            check_sampling(request.sampling)
    except ConfigError as error:
        problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        message = f"{len(problems)} problems with these options:" + list_offenders([one.message for one in problems])
        raise ConfigError(message, tries=list(dict.fromkeys(line for one in problems for line in one.tries)))


def _problems(request: Request, *, is_settled: bool) -> Iterator[ConfigError]:
    yield from _prompt_problems(request)
    for name, text in (("--system", request.system), *(("--stop", stop) for stop in request.stop)):
        if where := _not_utf8(text or ""):
            yield ConfigError(f"{name} is not UTF-8: {where}")
    if "" in request.stop:
        yield ConfigError("--stop is empty, and every text ends with nothing", tries=['--stop "###"'])
    if is_settled and request.samples > 1 and request.sampling.temperature == 0 and not request.score:
        yield ConfigError(
            f"--samples {request.samples} at temperature 0 would all be equal: give --temperature",
            tries=["--temperature 1"],
        )
    is_text = request.batch is None and not request.as_json
    if request.logprobs is not None and is_text and not is_conversation(request):
        yield ConfigError("--logprobs cannot be shown in plain text", tries=["--json"])
    if request.quantize and request.dtype == "float16":
        yield ConfigError(
            "--quantize with --dtype float16: sums over 8-bit weights exceed 65504, float16's largest number",
            tries=["--dtype bfloat16"],
        )
    if request.score:
        yield from _no_effect(_GENERATION_OPTIONS, request, "with --score, which generates no tokens")
        yield from _no_effect(("--batch-size",), request, "with --score, which reads one text at a time")
    if is_conversation(request):
        yield from _no_effect(_RESULT_OPTIONS, request, "in a conversation; give a prompt")
    elif request.context is not None and not request.score:
        yield ConfigError("--context is for a conversation (--chat without a prompt), or for --score")
    if request.chat:
        yield from _no_effect(_PLAIN_TEXT_OPTIONS, request, "in a chat, where the template adds the special tokens")
    elif request.system is not None:
        yield ConfigError("--system is a message of a --chat", tries=["--chat"])


def _prompt_problems(request: Request) -> Iterator[ConfigError]:
    if request.text is None and request.batch is None and not is_conversation(request):
        or_chat = "" if request.score else "; or --chat"
        yield ConfigError(
            f"give a prompt: --prompt TEXT, --prompt-file FILE, - for standard input, or --batch FILE{or_chat}",
            tries=['--prompt "" --from-bos'] if request.from_bos else [],
        )
    if request.text is not None and request.batch is not None:
        yield ConfigError("--batch has prompts of its own: leave the other prompt out")
    elif request.text is not None and (problem := why_empty(request.text, from_bos=request.from_bos)):
        can_be_empty = not (request.chat or request.score)
        yield ConfigError(f"the prompt {problem}", tries=[FROM_BOS if can_be_empty else '--prompt "Once upon a time"'])
    if request.batch is None:
        if request.out is not None:
            yield ConfigError("--out is the results file of a --batch", tries=["--batch FILE"])
        if request.batch_size is not None and request.samples == 1 and request.text is not None and not request.score:
            yield ConfigError("--batch-size is for a --batch, or for --samples: there is one sequence here")


def is_conversation(request: Request) -> bool:
    """Whether messages are read from standard input: --chat without a prompt."""
    return request.chat and request.text is None and request.batch is None and not request.score


_GENERATION_OPTIONS = (
    "--chat", "--max-new-tokens", "--stop", "--ignore-eos", "--temperature", "--top-k", "--top-p", "--min-p",
    "--repetition-penalty", "--generation-config", "--samples", "--truncate", "--from-bos", "--compile",
)  # fmt: skip
_RESULT_OPTIONS = ("--json", "--samples", "--logprobs", "--truncate", "--batch-size")
_PLAIN_TEXT_OPTIONS = ("--from-bos", "--special-tokens")


def _no_effect(names: tuple[str, ...], request: Request, where: str) -> Iterator[ConfigError]:
    given = _given(request)
    yield from (ConfigError(f"{name} has no effect {where}") for name in names if given[name])


def _given(request: Request) -> dict[str, bool]:
    """Whether an option has another value than its default, by its name."""
    return {
        "--json" if field.name == "as_json" else f"--{field.name.replace('_', '-')}": (
            getattr(record, field.name) != field.default
        )
        for record in (request, request.sampling)
        for field in fields(record)
        if field.default is not MISSING
    }


def _not_utf8(text: str) -> str:
    """Which byte of an argument is not UTF-8; Python passes such bytes as lone surrogates."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte 0x{data[error.start]:02x} at offset {error.start}"
    return ""
