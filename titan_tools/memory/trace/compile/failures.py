"""What torch's compiler cannot do, told as an error of ours."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from converters.errors import TitanError
from titan_tools.memory.trace.compile.code import FILE_NAME
from titan_tools.memory.trace.refused import NotTraceable, chain

_OF_THE_COMPILER = TorchDynamoException | FailOnRecompileLimitHit
_TOLD_TO_DEVELOPERS = ("raised exception ", "unsupported operator: ")


@contextmanager
def compiler_failures_told() -> Iterator[None]:
    """Within, an error of Dynamo, AOTAutograd or Inductor is a NotTraceable, and so is one of the code they wrote.

    An error of ours that comes up while they work stays what it is. What Dynamo warns of is told by its errors.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo\.")
            yield
    except Exception as error:
        errors = list(chain(error))
        if own := next((each for each in errors if isinstance(each, TitanError)), None):
            raise own from None
        if failed := next((each for each in errors if isinstance(each, _OF_THE_COMPILER)), None):
            what = "torch.compile fails on this model"
        elif failed := next(filter(_comes_from_written_code, errors), None):
            what = "what this torch's Inductor writes cannot be followed"
        else:
            raise
        raise NotTraceable(
            f"no estimate is given: {what}: {_in_a_line(failed)}",
            hint="uncompiled, a model mostly needs more memory, and shows where an error of its own comes from",
            nearest={"compile.enable": "false"},
        ) from error


def _comes_from_written_code(error: BaseException) -> bool:
    """Whether Python itself stumbled over a line of it: over a name or an argument that is not known here."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return isinstance(error, NameError | AttributeError | TypeError) and [each.filename for each in last] == [FILE_NAME]


def _in_a_line(error: BaseException) -> str:
    """What a part of the compiler said: its first line, Dynamo's explanation and the line of the model's code.

    Of exceptions in the model, and of operations without shapes, Dynamo explains less than it tells developers.
    """
    while inner := getattr(error, "inner_exception", None):
        error = inner
    first, *others = [line.strip() for line in str(error).strip().splitlines()] or [""]
    explained = [line.partition(": ")[2] for line in others if line.startswith("Explanation: ")]
    context = [line.partition(": ")[2] for line in others if line.startswith("Developer debug context: ")]
    if any(said.startswith(_TOLD_TO_DEVELOPERS) for said in context):
        explained = context
    code = [line for line in others if line.startswith("File ")] if "from user code:" in others else []
    said = ". ".join(part.rstrip(".") for part in (first, *explained[:1]) if part)
    place = f" ({code[-1]})" if code else ""
    return f"{type(error).__name__}: {said:.500}{place}" if said else type(error).__name__
