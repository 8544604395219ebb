"""Take a checkpoint through titan and say how the answer compares with transformers': the same, or a clear refusal."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from converters.common.errors import CheckpointError, TitanError, UnsupportedError
from tests.doors import convert
from tests.tiny_infer import complete, load
from titan_tools.infer.decoding.engine import Engine

RELATIVE = 1e-5  # of the largest logit
OWN_ERRORS = 4  # of transformers' own error against float64
NUM_NEW = 8
PROMPT = [3, 71, 22, 9, 64, 5, 17, 80, 33, 2, 48, 56, 12, 90, 41, 7]
SAME, REFUSED, UNJUDGED = "same", "refused", "accepted, and transformers does not load it"
WRONG, CRASHED = "WRONG", "CRASHED"
UNCLEAR, NEEDLESS = "REFUSED, naming neither class nor field", "REFUSED, must be accepted"
NO_WAY_OUT = "REFUSED, without a command that works"
_WORST_FIRST = (CRASHED, WRONG, UNCLEAR, REFUSED, SAME)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case: one of the constants above, and in which words."""

    kind: str
    words: str = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """transformers' own answer. `tolerance`: how far another right answer may be from it."""

    model: PreTrainedModel
    logits: Tensor
    tolerance: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Reference":
        """What `model` says, in float32 whatever its dtype is; the model is left in float32."""
        model.set_experts_implementation("eager")  # the one that computes in float64
        exact = _logits(model.double())
        logits = _logits(model.float())
        own_error = (logits.double() - exact.double()).abs().max().item()
        return cls(model, logits, max(RELATIVE * logits.abs().max().item(), OWN_ERRORS * own_error))


def load_reference(folder: Path) -> Reference | None:
    """What transformers computes from a folder; None where it raises, or uses only some of the weights."""
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if any(loaded.values()):
            return None
        reference = Reference.of(model.eval())
    except Exception:  # whatever a library raises for a config that it does not understand
        return None
    return reference if reference.logits.isfinite().all() else None


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0].detach()


def titan_logits(folder: Path, **options: Any) -> tuple[Tensor, list[int]]:
    """The logits of PROMPT as `titan infer` computes them, and the greedy tokens behind it."""
    model = load(folder, **options)
    (said,) = complete(model, [PROMPT], max_new_tokens=NUM_NEW)
    with torch.inference_mode():
        hidden_LD = torch.cat(list(Engine(model, rows=1, room=len(PROMPT)).hidden(0, PROMPT)))
        return model.head(hidden_LD).float(), said.tokens


def answers(folder: Path, reference: Reference | None, **options: Any) -> None:
    """Have titan infer from `folder`. Raises AssertionError where it says something else than the reference."""
    logits, tokens = titan_logits(folder, **options)
    if reference is not None:
        _require_equal(logits, reference)
        _require_greedy(tokens, reference)


def _require_equal(logits: Tensor, reference: Reference) -> None:
    assert logits.shape == reference.logits.shape
    off = (logits - reference.logits).abs().max().item()
    assert off <= reference.tolerance, f"logits differ by {off:.3g}, tolerated are {reference.tolerance:.1g}"


@torch.no_grad()
def _require_greedy(tokens: list[int], reference: Reference) -> None:
    """Each token is the likeliest behind those before it, or no further behind that than both errors together."""
    whole = torch.tensor([[*PROMPT, *tokens]])
    logits = reference.model(input_ids=whole, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    behind = logits.max(-1).values - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert behind.max() <= 2 * reference.tolerance, f"a greedy token is {behind.max():.3g} behind the likeliest"


def converts_and_back(folder: Path, reference: Reference | None, scratch: Path) -> None:
    """Convert `folder` to DCP and back; titan's answer from the one and transformers' from the other are compared."""
    convert(folder, scratch / "dcp", to="dcp", source="hf")
    answers(scratch / "dcp", reference)
    convert(scratch / "dcp", scratch / "hf", to="hf", source="dcp")
    if reference is not None:
        back = load_reference(scratch / "hf")
        assert back is not None, "transformers does not load what came back"
        _require_equal(back.logits, reference)


def outcome_of(folder: Path, scratch: Path, *, names: Iterable[str], accepted: bool = False) -> Outcome:
    """Infer from an HF folder, convert it and back: the worse of the two outcomes.

    `names`: what a refusal has to name one of. `accepted`: there may be no refusal. Without an answer of transformers
    to compare with, titan may refuse for any reason; that it accepts is an outcome of its own.
    """
    scratch.mkdir()
    reference, names = load_reference(folder), tuple(names)
    kinds = [
        attempt(lambda: answers(folder, reference), scratch, names),
        attempt(lambda: converts_and_back(folder, reference, scratch), scratch, names),
    ]
    worst = min(kinds, key=lambda outcome: _WORST_FIRST.index(outcome.kind))
    refused = (REFUSED, UNCLEAR)
    if sum(outcome.kind in refused for outcome in kinds) == 1 and worst.kind in refused:
        return Outcome(WRONG, f"one command accepts what the other refuses: {worst.words}")
    if reference is None and worst.kind in (SAME, *refused):
        return Outcome(UNJUDGED if worst.kind == SAME else REFUSED, worst.words)
    return Outcome(NEEDLESS, worst.words) if accepted and worst.kind in refused else worst


def attempt(act: Callable[[], None], scratch: Path, names: Iterable[str]) -> Outcome:
    """What `act` comes to. A refusal that leaves anything in `scratch` counts as wrong."""
    before = set(scratch.iterdir())
    try:
        act()
    except AssertionError as error:
        return Outcome(WRONG, str(error))
    except TitanError as error:
        words = "\n".join([error.message, error.hint, *error.tries])
        if left := sorted(path.name for path in set(scratch.iterdir()) - before):
            return Outcome(WRONG, f"refused, with {left} left behind: {words}")
        clear = isinstance(error, CheckpointError | UnsupportedError) and is_named(words, names)
        return Outcome(REFUSED if clear else UNCLEAR, words)
    except Exception as error:  # which the command line shows with its traceback, exit code 3
        return Outcome(CRASHED, f"{type(error).__name__}: {error}")
    return Outcome(SAME)


def is_named(words: str, names: Iterable[str]) -> bool:
    """Whether one of `names` stands in `words` as a word; "RoPE scaling" is `rope_scaling`."""
    flat = re.sub(r"[ _]", "_", words.lower())
    return any(re.search(rf"(?<![a-z0-9]){re.escape(name.lower())}(?![a-z0-9])", flat) for name in names if name)


def assert_same_or_refused(outcome: Outcome, *, allowed: Iterable[str] = (SAME, REFUSED)) -> None:
    """Fail a case where the answer is neither transformers' nor a clear refusal."""
    assert outcome.kind in allowed, f"{outcome.kind}: {outcome.words}"
