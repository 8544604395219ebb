"""Which options of `titan infer` go together: all that do not are told at once, before anything is read."""

from collections.abc import Iterator

from converters.errors import ConfigError
from titan_tools.infer.request import Request
from titan_tools.infer.sampling import check_sampling


def check_options(request: Request) -> None:
    """Raise ConfigError with everything in the request that has no meaning beside the rest of it."""
    if problems := list(_problems(request)):
        raise ConfigError("; ".join(problems))
    check_sampling(request.sampling)


def _problems(request: Request) -> Iterator[str]:
    if request.text is None and request.batch is None and not request.chat:
        yield "give a prompt: --prompt TEXT, --prompt-file FILE, - for standard input, or --batch FILE; or --chat"
    if request.text is not None and request.batch is not None:
        yield "--batch has prompts of its own: leave the other prompt out"
    if request.out is not None and request.batch is None:
        yield "--out is where the results of a --batch go"
    if request.system is not None and not request.chat:
        yield "--system is a message of a --chat"
    if request.score:
        asked = {
            "--chat": request.chat,
            "--temperature": request.sampling.temperature,
            "--samples": request.samples != 1,
            "--max-new-tokens": request.max_new_tokens,
            "--stop": request.stop,
        }
        yield from (
            f"{name} has no meaning with --score, which makes no new tokens" for name, said in asked.items() if said
        )
    if request.samples > 1 and request.sampling.temperature == 0:
        yield f"--samples {request.samples} at temperature 0 would all be alike: give --temperature"
    if _is_conversation(request):
        asked = {
            "--json": request.as_json,
            "--samples": request.samples != 1,
            "--logprobs": request.logprobs is not None,
        }
        yield from (f"{name} has no meaning in a conversation; give a prompt" for name, said in asked.items() if said)
    elif request.context is not None:
        yield "--context is of a conversation: --chat without a prompt"


def _is_conversation(request: Request) -> bool:
    return request.chat and request.text is None and request.batch is None
