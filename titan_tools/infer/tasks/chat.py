"""A conversation: each line of standard input is a message, its answer is streamed, the cache keeps what was said.

Where standard input is not a terminal, its lines are the messages, and any problem ends the program.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from converters.common.errors import ConfigError, TitanError
from converters.tokenizers.tokenizer import Tokenizer
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import GenerationSettings, Timings, generate
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.report import describe, stats_of
from titan_tools.infer.task import Work, generation_settings
from titan_tools.infer.text.channels import answer_in_template
from titan_tools.infer.text.chat_template import ChatTemplate
from titan_tools.infer.text.chat_tokens import encode_chat
from titan_tools.infer.text.prompts import Prompt
from titan_tools.launch.rank import inside_launch
from titan_tools.terminal.console import count, note, stream

DEFAULT_CONTEXT = 8192  # tokens, if the model has more: a cache for all of them may not fit
MOST_ANSWER_TOKENS = 1024  # without --max-new-tokens
HELP = """\
/reset        forget the conversation; the system message stays
/system TEXT  replace the system message, remove it without TEXT
/retry        answer the last message again
/exit         leave, as Ctrl-D does
Ctrl-C stops an answer; with --tp, and between answers, it leaves.
A message that begins with / needs a space before it."""
_INPUT_PROMPT = "> "


@dataclass(slots=True)
class ChatTask:
    """Answers messages until the input ends; see task.py. The first rank reads them, all ranks get its next prompt."""

    work: Work
    settings: GenerationSettings
    history: "ChatHistory"
    room: int
    rows: int = 1
    least_tokens: int = 0

    def run(self, engine: Engine | None, ranks: TPRanks) -> None:
        assert engine is not None
        timings, secs, num_answers = Timings(), 0.0, 0
        lines = InputLines(edits=ranks.tp == 1) if ranks.is_first else None
        if lines and lines.is_terminal:
            note(f"{self.room} tokens of context; /help shows the commands, Ctrl-D leaves")
        # All ranks get the first one's turn or error, so that none waits for another that has ended
        while turn := ranks.done_by_first(lambda: self._next_turn(lines)):
            started = perf_counter()
            text = self._answer(turn, engine, timings, lines)
            secs, num_answers = secs + perf_counter() - started, num_answers + 1
            if lines:
                self.history.add_answer(text)
                if not text:
                    note("(no answer, so the message is forgotten; /retry sends it again)")
        if timings.num_tokens:
            stats = stats_of(timings, engine, ranks, self.work, secs=secs)
            if ranks.is_first:
                note(describe(stats, num=num_answers))

    def _next_turn(self, lines: "InputLines | None") -> "Turn | None":
        """The next message to answer; None at the end of the input. On the first rank."""
        assert lines is not None
        while True:
            try:
                line = lines.read()
                if line is None or line.strip() == "/exit":
                    return None
                if turn := self._turn_of(line):
                    break
            except TitanError as error:
                if not lines.is_terminal:
                    raise
                note(f"{error.message}; {error.hint}" if error.hint else error.message)
        if turn.num_dropped:
            note(f"({count(turn.num_dropped, 'message')} at the beginning no longer fit, and are forgotten)")
        return turn

    def _turn_of(self, line: str) -> "Turn | None":
        """The prompt for a line; None for a command that only changes the conversation."""
        command, _, rest = line.partition(" ")
        match command:
            case "/reset":
                self.history.reset()
            case "/system":
                self.history.set_system(rest.strip() or None)
            case "/retry":
                return self.history.retry()
            case "/help":
                note(HELP)
            case _ if line.startswith("/"):
                raise ConfigError(f"there is no command {command}", hint="/help shows them")
            case _:
                return self.history.ask(line)
        return None

    def _answer(self, turn: "Turn", engine: Engine, timings: Timings, lines: "InputLines | None") -> str:
        """Complete the prompt and, on the first rank, print it; the answer's text, which Ctrl-C may have cut off."""
        settings, printed = replace(self.settings, max_new_tokens=turn.num_new), list[str]()

        def show(text: str) -> None:
            printed.append(text)
            stream(text)

        try:
            (completion,) = generate(
                engine,
                [turn.prompt],
                settings,
                self.work.vocabulary,
                timings=timings,
                on_text=show if lines else None,
            )
        except KeyboardInterrupt:
            if not (lines and lines.is_terminal):
                raise
            stream("\n")
            note("(stopped)")
            return "".join(printed)
        if lines:
            stream("\n")
            if completion.finish_reason == "length":
                note(f"(cut after {count(len(completion.tokens), 'token')})")
        return completion.text


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt to answer with up to `num_new` tokens."""

    prompt: Prompt
    num_new: int
    num_dropped: int  # messages forgotten to make room


class ChatHistory:
    """The messages of user and model in turn, after a system message if there is one.

    An answer may have `max_new_tokens`, or a quarter of the context if that is less. Where less is left, the oldest
    messages are dropped until half of the context is free: not one by one, since the rest is computed again each time.
    Raises if the system message and a short question do not fit the context.
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
        self.unanswered = ""  # the last message, where its answer was empty
        self.num_asked = 0
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None removes it."""
        tokens = self._encode(text, ["?"])
        if len(tokens) >= self.context:
            what = f"the system message takes {len(tokens)}" if text else f"a question takes {len(tokens)}"
            raise ConfigError(f"{what} of the context's {self.context} tokens: no room is left for an answer")
        self.system = text

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages, self.unanswered = [], ""

    def ask(self, text: str) -> Turn:
        """A prompt of all messages and `text`. Raises ConfigError, and changes nothing, if `text` is too long."""
        return self._turn([*self.messages, text])

    def retry(self) -> Turn:
        """The last message again; with a temperature its answer is another one."""
        if self.unanswered:
            return self.ask(self.unanswered)
        if not self.messages:
            raise ConfigError("there is no message to answer again")
        return self._turn(self.messages[:-1])

    def add_answer(self, text: str) -> None:
        """Add the model's answer to the last message, which an empty answer removes."""
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
                hint="no room would be left for an answer",
            )
        self.messages, self.unanswered = messages, ""
        prompt = Prompt(str(self.num_asked), messages[-1], tokens)
        self.num_asked += 1
        return Turn(prompt, num_new, num_messages - len(messages))

    def _encode(self, system: str | None, messages: Sequence[str]) -> list[int]:
        source = self.template.source
        chat = [
            answer_in_template(source, text) if i % 2 else {"role": "user", "content": text}
            for i, text in enumerate(messages)
        ]
        if system is not None:
            chat.insert(0, {"role": "system", "content": system})
        return encode_chat(self.template, self.tokenizer, chat)


class InputLines:
    """Lines of standard input; blank ones are skipped.

    `edits`: line editing and history at a terminal. Not in a process that others may kill: the terminal would stay
    without echo.
    """

    def __init__(self, *, edits: bool):
        self._is_open = sys.stdin is not None and not sys.stdin.closed
        self.is_terminal = self._is_open and sys.stdin.isatty()
        self._edits = edits and self.is_terminal and sys.stdout.isatty()
        self._num_read = self._num_messages = 0
        if self._edits:
            with contextlib.suppress(ImportError):  # Python may be built without it
                import readline  # noqa: F401, used by input() once it is loaded

    def read(self) -> str | None:
        """The next line without its end; None after the last.

        Raises ConfigError for a line that is not UTF-8 or holds a NUL byte, and if there is no input at all.
        """
        if not self._is_open:
            own_ranks = "titan infer … --tp N --chat, which starts the ranks itself"
            raise ConfigError(
                "there is no standard input to read messages from",
                tries=["--chat --prompt TEXT", *([own_ranks] if inside_launch() else [])],
            )
        while True:
            try:
                line = self._read_line()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"line {self._num_read} of standard input is not UTF-8: byte 0x{error.object[error.start]:02x} at "
                    f"offset {error.start}"
                ) from None
            if line and "\0" in line:
                offset = len(line.partition("\0")[0].encode())
                raise ConfigError(f"line {self._num_read} of standard input holds a NUL byte at offset {offset}")
            if line is None and not self._num_messages and not self.is_terminal:
                raise ConfigError("standard input holds no message", tries=["--chat --prompt TEXT"])
            if line is None or line.strip():
                self._num_messages += 1
                return line

    def _read_line(self) -> str | None:
        self._num_read += 1
        if self._edits:
            try:
                # input() gives bytes that are not UTF-8 as lone surrogates
                return input(_INPUT_PROMPT).encode("utf-8", "surrogateescape").decode("utf-8")
            except EOFError:
                print(flush=True)
                return None
            except KeyboardInterrupt:
                print(flush=True)  # the message about it needs a line of its own
                raise
        if self.is_terminal:
            print(_INPUT_PROMPT, end="", file=sys.stderr, flush=True)
        raw = sys.stdin.buffer.readline()
        if not raw:
            if self.is_terminal:
                print(file=sys.stderr, flush=True)
            return None
        return raw.decode("utf-8").rstrip("\r\n")


def prepare_chat(work: Work) -> ChatTask:
    """A conversation of `--context` tokens. Raises if the template or the context cannot hold even a short one."""
    request, most = work.request, work.args.max_seq_len
    assert work.template is not None
    context = request.context or min(most, request.max_length or DEFAULT_CONTEXT)
    if context > most:
        raise ConfigError(f"--context {context} is more than the model's {most} tokens", tries=[f"--context {most}"])
    if request.max_new_tokens and request.max_new_tokens >= context:
        raise ConfigError(
            f"--max-new-tokens {request.max_new_tokens} leaves no room for messages in a context of {context} tokens",
            tries=[f"--max-new-tokens {max(1, context // 4)}"],
        )
    history = ChatHistory(
        work.template,
        work.vocabulary.tokenizer,
        context=context,
        max_new_tokens=request.max_new_tokens,
        system=request.system,
    )
    return ChatTask(work, generation_settings(work, max_new_tokens=context), history, room=context)
