"""Messages of a conversation, written as the checkpoint's chat template says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it may name."""

    source: str
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, str]], *, answer: bool = True) -> str:
        """The text of `messages` (role, content); `answer`: with the beginning of the model's next one."""
        raise NotImplementedError


def encode_chat(template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a conversation up to where the model answers. The template says where its special tokens stand."""
    raise NotImplementedError


def read_template(folder: Path) -> ChatTemplate:
    """The template of a checkpoint's folder. Raises CheckpointError where there is none."""
    raise NotImplementedError
