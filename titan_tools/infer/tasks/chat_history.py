"""What was said in a conversation, and how the next prompt is made of it so that an answer fits behind."""

from collections.abc import Sequence
from dataclasses import dataclass

from converters.errors import ConfigError
from titan_tools.infer.text.chat_template import ChatTemplate
from titan_tools.infer.text.chat_tokens import encode_chat
from titan_tools.infer.text.prompts import Prompt
from trainer.data.tokenizer import Tokenizer

MOST_ANSWER_TOKENS = 1024  # unless --max-new-tokens says another number


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt to answer with up to `num_new` tokens."""

    prompt: Prompt
    num_new: int
    num_dropped: int  # messages that were forgotten for it


class History:
    """User's and model's messages by turns, behind a system message if there is one.

    An answer gets `max_new_tokens`, or a quarter of the context if that is less. Where so much is not left the oldest
    messages are forgotten until half of the context is free: not one by one, since every time all that is left has to
    be read again. Raises where the template or the context cannot hold the system message and a short question.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        context: int,
        max_new_tokens: int | None = None,
        system: str | None = None,
    ):
        self.template, self.tokenizer, self.context = template, tokenizer, context
        self.most_new = max_new_tokens or MOST_ANSWER_TOKENS
        self.messages: list[str] = []
        self.unanswered = ""  # the last message, where nothing came of it
        self.num_asked = 0
        self.change_system(system)

    def change_system(self, text: str | None) -> None:
        """Let another system message, or none, stand before all that was said."""
        tokens = self._encode(text, ["?"])
        if len(tokens) >= self.context:
            what = f"the system message takes {len(tokens)}" if text else f"a question takes {len(tokens)}"
            raise ConfigError(f"{what} of the context's {self.context} tokens: nothing is left for an answer")
        self.system = text

    def forget(self) -> None:
        """Begin anew."""
        self.messages, self.unanswered = [], ""

    def ask(self, text: str) -> Turn:
        """A prompt of all that was said and `text`.

        Raises ConfigError where `text` alone is too long; nothing has changed then.
        """
        return self._turn([*self.messages, text])

    def ask_again(self) -> Turn:
        """The last message once more; with a temperature the answer is another one."""
        if self.unanswered:
            return self.ask(self.unanswered)
        if not self.messages:
            raise ConfigError("nothing was said that could be answered once more")
        return self._turn(self.messages[:-1])

    def take_answer(self, text: str) -> None:
        """What the model said to the last message; where that is nothing, what follows knows nothing of the message."""
        if text:
            self.messages.append(text)
        else:
            self.unanswered = self.messages.pop()

    def _turn(self, messages: list[str]) -> Turn:
        num_messages = len(messages)
        tokens = self._encode(self.system, messages)
        if self.context - len(tokens) < min(self.most_new, self.context // 4):
            while len(messages) > 1 and len(tokens) > self.context // 2:
                messages = messages[2:]
                tokens = self._encode(self.system, messages)
        num_new = min(self.most_new, self.context - len(tokens))
        if num_new < 1:
            raise ConfigError(
                f"the message makes a prompt of {len(tokens)} tokens, and the context has {self.context}",
                hint="nothing would be left for an answer",
            )
        self.messages, self.unanswered = messages, ""
        prompt = Prompt(str(self.num_asked), messages[-1], tokens)
        self.num_asked += 1
        return Turn(prompt, num_new, num_messages - len(messages))

    def _encode(self, system: str | None, messages: Sequence[str]) -> list[int]:
        said = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(messages)]
        if system is not None:
            said.insert(0, {"role": "system", "content": system})
        return encode_chat(self.template, self.tokenizer, said)
