"""What a call of `titan infer` is there to do: one prompt, a batch, a conversation, or scoring. Each has a file."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from converters.families.base import ModelArgs
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.origin import Origin
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.request import Request
from titan_tools.infer.text.chat_template import ChatTemplate
from titan_tools.infer.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Work:
    """A request, and all that headers, tokenizer and numbers show before ranks start and weights are read."""

    request: Request
    args: ModelArgs
    vocabulary: Vocabulary
    template: ChatTemplate | None  # of a chat
    tp: int
    dtype: str
    origin: Origin | None = None  # where results are kept, for a later run, and where ranks must have the same
    batch_digest: Any = field(default_factory=blake2b)  # taken as its lines are read


class Task(Protocol):
    """Made from `Work` by its file's `prepare`, which raises where what was asked cannot be."""

    rows: int  # sequences at a time; the first rank's is 0 where an earlier run has left nothing to do
    room: int  # tokens of the longest, new ones included

    def run(self, engine: Engine | None, ranks: Ranks) -> None:
        """Do it on all ranks; the first one prints. There is no engine where there are no rows."""
