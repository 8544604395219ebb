"""What a user asked of `titan infer`, and how that travels to the ranks that one process starts."""

import json
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path

from converters.errors import ConfigError
from titan_tools.infer.decoding.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One call: the command's options by their names. None is what its help calls the default."""

    checkpoint: Path
    sampling: Sampling
    # what to say something about: one of the two, or neither for a conversation
    text: str | None = None
    batch: Path | None = None
    out: Path | None = None  # of a batch; None: standard output
    chat: bool = False  # prompts are what a user says, put into the checkpoint's chat template
    system: str | None = None
    score: bool = False  # how likely are the texts, instead of what follows them
    generation_config: bool = False  # follow the checkpoint's, where no option in `explicit` was given
    explicit: tuple[str, ...] = ()
    # how far
    max_length: int | None = None  # of prompt and new tokens together, from the generation config
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    context: int | None = None  # tokens that a conversation may hold, or a window of a score
    truncate: str | None = None  # "left": prompts that do not fit lose their beginning
    from_bos: bool = False  # an empty prompt is the begin-of-text token alone
    special_tokens: bool = False  # <|…|> in a prompt are tokens, not text
    # what is told
    samples: int = 1
    logprobs: int | None = None
    as_json: bool = False
    # where it runs
    tp: int | None = None
    dtype: str | None = None
    quantize: str | None = None  # "int8" or "float8"
    compile: bool = False
    batch_size: int | None = None  # sequences at a time
    model_from: Path | None = None  # a folder that says what the model is and has its tokenizer
    # what time it is to a chat template: the first process's, as ranks that asked for themselves could disagree
    moment: datetime = field(default_factory=datetime.now)


_PATHS = ("checkpoint", "batch", "out", "model_from")


def save_request(request: Request, path: Path) -> None:
    """Write what `load_request` reads. Paths become absolute."""
    values = asdict(request)
    for name in _PATHS:
        if values[name] is not None:
            values[name] = str(Path(values[name]).absolute())
    values["moment"] = request.moment.isoformat()
    path.write_text(json.dumps(values), encoding="utf-8")


def load_request(path: Path) -> Request:
    """Raises ConfigError for a file of somebody else's: the option that names it is for ranks."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict) or values.keys() != {field.name for field in fields(Request)}:
        raise ConfigError(f"--request {path}: not what titan writes for the ranks that it starts; leave it out")
    for name in _PATHS:
        if values[name] is not None:
            values[name] = Path(values[name])
    made = {"sampling": Sampling(**values["sampling"]), "moment": datetime.fromisoformat(values["moment"])}
    return Request(**values | made | {name: tuple(values[name]) for name in ("stop", "explicit")})
