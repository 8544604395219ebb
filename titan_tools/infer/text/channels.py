"""Answers in channels, as GPT-OSS writes them (OpenAI's Harmony format): thoughts, calls of tools, final answers.

The prompt ends with `<|start|>assistant`. The model writes `<|channel|>analysis<|message|>…<|end|>`, then
`<|start|>assistant<|channel|>final<|message|>…<|return|>`, or ends a call of a tool with `<|call|>`. So `<|end|>` does
not end its turn, though it follows each earlier answer in the prompt.
"""

import re
from dataclasses import dataclass

CHANNEL, FINAL, ANALYSIS = "<|channel|>", "final", "analysis"
TURN_ENDS = ("<|return|>", "<|call|>")
_PART = re.compile(
    r"<\|channel\|>(?P<channel>\w*)(?P<recipient>(?:(?!<\|message\|>).)*)<\|message\|>(?P<text>.*?)"
    r"(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|start\|>|<\|channel\|>|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model has said: to the user, and to itself."""

    content: str
    thinking: str


def uses_channels(template: str) -> bool:
    """Whether a chat template has answers in channels."""
    return CHANNEL in template


def read_answer(text: str) -> Answer:
    """The parts of a generated text, which begins behind `<|start|>assistant` or with plain text.

    Calls of tools are in neither part: `titan` has no tools. An answer that was cut off in its thoughts has no content.
    """
    parts = [(part["channel"], part["text"]) for part in _PART.finditer(text)]
    if not parts:
        return Answer(text, "")
    said = {name: "".join(words for channel, words in parts if channel == name) for name in (FINAL, ANALYSIS)}
    return Answer(said[FINAL], said[ANALYSIS])


def answer_in_template(template: str, text: str) -> dict[str, str]:
    """The message of a generated text. Templates with channels take the thoughts of one by themselves."""
    if not uses_channels(template):
        return {"role": "assistant", "content": text}
    answer = read_answer(text)
    return {"role": "assistant", "content": answer.content, "thinking": answer.thinking}
