"""Talk with the model: a line is a message, its answer is shown as it comes, and keys of what was said stay cached.

Where standard input is no terminal its lines are the messages, one after another, and anything wrong ends the program.
"""

from dataclasses import dataclass, replace
from time import perf_counter

from converters.errors import ConfigError, TitanError
from titan_tools.console import count, note, stream
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Settings, Timings, generate
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.report import describe, stats_of
from titan_tools.infer.task import Work
from titan_tools.infer.tasks.chat_history import History, Turn
from titan_tools.infer.tasks.chat_lines import Lines
from titan_tools.infer.tasks.settings import settings_of

DEFAULT_CONTEXT = 8192  # of a conversation, where the model has more: a cache for all of it may not fit
HELP = """\
/reset        forget what was said; the system message stays
/system TEXT  another system message, none without TEXT
/retry        answer the last message once more
/exit         leave, as Ctrl-D does
Ctrl-C stops an answer; with --tp, and between answers, it leaves.
A message that begins with / needs a space before it."""


@dataclass(slots=True)
class Conversation:
    """A task; see task.py. The first rank listens and remembers; all of them get its next prompt."""

    work: Work
    settings: Settings
    history: History
    room: int
    rows: int = 1

    def run(self, engine: Engine, ranks: Ranks) -> None:
        timings, secs, num_answers = Timings(), 0.0, 0
        lines = Lines(edits=ranks.tp == 1) if ranks.is_first else None
        if lines and lines.is_terminal:
            note(f"{self.room} tokens of context; /help shows the commands, Ctrl-D leaves")
        # Told by the first, and what is wrong with it too: none of them ends by the silence of another
        while turn := ranks.done_by_first(lambda: self._next_turn(lines)):
            started = perf_counter()
            text = self._answer(turn, engine, timings, lines)
            secs, num_answers = secs + perf_counter() - started, num_answers + 1
            if lines:
                self._remember(text)
        if timings.num_tokens:
            stats = stats_of(timings, engine, ranks, self.work, secs=secs)
            if ranks.is_first:
                note(describe(stats, num=num_answers))

    def _next_turn(self, lines: Lines) -> Turn | None:
        """What the next lines ask for; None at their end. The first rank's."""
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

    def _turn_of(self, line: str) -> Turn | None:
        """What a line asks the model, and None where it only changes something."""
        command, _, rest = line.partition(" ")
        match command:
            case "/reset":
                self.history.forget()
            case "/system":
                self.history.change_system(rest.strip() or None)
            case "/retry":
                return self.history.ask_again()
            case "/help":
                note(HELP)
            case _ if line.startswith("/"):
                raise ConfigError(f"there is no command {command}", hint="/help shows them")
            case _:
                return self.history.ask(line)
        return None

    def _remember(self, text: str) -> None:
        self.history.take_answer(text)
        if not text:
            note("(no answer, so the message is forgotten; /retry says it again)")

    def _answer(self, turn: Turn, engine: Engine, timings: Timings, lines: Lines | None) -> str:
        """Continue the prompt, which the first rank shows; its text, as far as it came where Ctrl-C stopped it."""
        settings, said = replace(self.settings, max_new_tokens=turn.num_new), []

        def show(text: str) -> None:
            said.append(text)
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
            return "".join(said)
        if lines:
            stream("\n")
            if completion.finish_reason == "length":
                note(f"(cut after {count(len(completion.tokens), 'token')})")
        return completion.text


def prepare_chat(work: Work) -> Conversation:
    """A conversation of `--context` tokens. Raises where the template or the context cannot hold even a short one."""
    request, most = work.request, work.args.max_seq_len
    context = request.context or min(most, request.max_length or DEFAULT_CONTEXT)
    if context > most:
        raise ConfigError(f"--context {context} is more than the model's {most} tokens", tries=[f"--context {most}"])
    if request.max_new_tokens and request.max_new_tokens >= context:
        raise ConfigError(
            f"--max-new-tokens {request.max_new_tokens} leaves nothing for messages in a context of {context} tokens",
            tries=[f"--max-new-tokens {max(1, context // 4)}"],
        )
    history = History(
        work.template,
        work.vocabulary.tokenizer,
        context=context,
        max_new_tokens=request.max_new_tokens,
        system=request.system,
    )
    return Conversation(work, settings_of(work, max_new_tokens=context), history, room=context)
