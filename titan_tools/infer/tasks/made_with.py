"""What made a file of results: settings in a file beside it, so that a rerun keeps only what it would make again.

It is written before the first result, while the results file is locked and empty, by one rename: there are never
results whose settings are unknown, or other ones than the file says.
"""

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from converters.errors import ConfigError, TitanError, list_offenders
from converters.families.base import args_to_json
from converters.json_file import parse_json
from titan_tools.infer.task import Work
from titan_tools.infer.tasks.replace_file import replace_file

_SUFFIX = ".settings.json"
_VERSION = 1
_MOMENT = "time in the prompts"
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class MadeWith:
    """What results depend on, by option or by what a person would call it, as JSON has it.

    `checkpoint` is where the weights lay: told to people, and not compared. Left out on purpose: the number of samples,
    which may grow, and what changes no token in fp32 (--tp, --batch-size, --compile).
    """

    checkpoint: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def made_with(work: Work) -> MadeWith:
    """What the results of a run will depend on. Its `work` has an origin."""
    request = work.request
    settings = {
        "weights": work.origin.weights,
        "tokenizer": work.origin.tokenizer,
        **{f"model.{name}": value for name, value in args_to_json(work.args).items()},
        "--score": request.score,
        "--dtype": work.dtype,
        "--quantize": request.quantize,
        "--tp": work.tp if request.quantize else None,  # rows that it cuts are rounded on each rank
        "--logprobs": request.logprobs,
        "--special-tokens": request.special_tokens,
        **(_of_scores(work) if request.score else _of_completions(work)),
    }
    return MadeWith(str(work.origin.checkpoint), json.loads(json.dumps(settings)))


def _of_scores(work: Work) -> dict[str, Any]:
    return {"--context": work.request.context or work.args.max_seq_len}


def _of_completions(work: Work) -> dict[str, Any]:
    request, sampling, template = work.request, work.request.sampling, work.template
    return {
        "--temperature": sampling.temperature,
        "--top-k": sampling.top_k,
        "--top-p": sampling.top_p,
        "--min-p": sampling.min_p,
        "--repetition-penalty": sampling.repetition_penalty,
        "--seed": sampling.seed,
        "--max-new-tokens": request.max_new_tokens,
        **({} if request.max_length is None else {"max_length": request.max_length}),
        "--stop": request.stop,
        "--ignore-eos": request.ignore_eos,
        "stop tokens": sorted(work.vocabulary.stop_ids),
        "stop strings": work.vocabulary.stop_strings,
        "--truncate": request.truncate,
        "--from-bos": request.from_bos,
        "--chat": request.chat,
        "--system": request.system,
        "chat template": template.identity if template else None,
        _MOMENT: template.moment.isoformat() if template and template.tells_time else None,
    }


def place_of(out: Path) -> Path:
    """The file of settings: beside the file itself where `out` is a link."""
    real = out.resolve()
    return real.with_name(real.name + _SUFFIX)


def read_made_with(out: Path) -> MadeWith | None:
    """What the file beside `out` says; None where there is none. Raises ConfigError where it is none of ours."""
    path = place_of(out)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:  # a pipe would be read without an end
            raise ConfigError("it is no file of settings")
        content = parse_json(path.read_bytes(), what="it")
        found = MadeWith(content["checkpoint"], content["settings"])
        if content["version"] != _VERSION:
            raise ConfigError(f"it is of version {content['version']!r:.20}, and this titan knows version {_VERSION}")
        if not isinstance(found.checkpoint, str) or not isinstance(found.settings, dict):
            raise KeyError
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _no_settings(out, f"cannot be read: {error.strerror}") from None
    except KeyError:
        raise _no_settings(out, "is not what titan infer wrote: it holds something else") from None
    except TitanError as error:
        raise _no_settings(out, f"is not what titan infer wrote: {error.message}") from None
    return found


def write_made_with(out: Path, made: MadeWith) -> None:
    """Replace the file beside `out`, or make it, by one rename. Raises ConfigError where that cannot be."""
    path = place_of(out)
    content = {"version": _VERSION, "checkpoint": made.checkpoint, "settings": dict(made.settings)}
    try:
        replace_file(path, [json.dumps(content, indent=1).encode(), b"\n"])
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint=f"no result is in {out} yet") from None


def require_same(before: MadeWith, now: MadeWith, *, out: Path) -> None:
    """Raise ConfigError with every setting that this run has otherwise than what made the results in `out`."""
    names = [name for name in (before.settings | now.settings) if before.settings.get(name) != now.settings.get(name)]
    if not now.settings.get("--temperature") and "--seed" in names:  # greedy draws nothing
        names.remove("--seed")
    if "--score" in names:  # most of the others are of one kind of result alone
        names = [name for name in names if name in before.settings and name in now.settings]
    if not names:
        return
    told = [f"{name}: {_told(name, before)} there, {_told(name, now)} here" for name in names]
    older = "weights" in names and before.checkpoint != now.checkpoint and Path(before.checkpoint).exists()
    raise ConfigError(
        f"{out} holds results that were made with other settings:" + list_offenders(told, most=100),
        hint=f"a rerun goes on with what made the file, which {place_of(out)} tells; nothing was written",
        tries=[*([f"titan infer {before.checkpoint} …, which made it"] if older else []), "--out ANOTHER_FILE"],
    )


def _told(name: str, made: MadeWith) -> str:
    value = made.settings.get(name)
    if name == "weights":
        return f"those of {made.checkpoint} ({value})"
    if value is None or isinstance(value, bool):
        return "given" if value else "not given"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def unknown_settings(out: Path) -> ConfigError:
    """The error for an `out` that holds results beside which there is no file of settings."""
    return ConfigError(
        f"{out} holds results, and {place_of(out)} is not there",
        hint="that file, which --out writes, tells which weights and options made them: put it back beside them. "
        "Without it, as of results that went to standard output, they cannot be continued; nothing was written",
        tries=["--out ANOTHER_FILE"],
    )


def _no_settings(out: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{place_of(out)} {why}",
        hint=f"this file must tell which weights and options make the results in {out}; nothing was written",
        tries=["--out ANOTHER_FILE"],
    )


def recorded_moment(out: Path | None) -> datetime | None:
    """What time it was to the chat template when the results in `out` were begun; None where there are none."""
    if out is None or not out.is_file() or not out.stat().st_size:
        return None
    before = read_made_with(out)
    told = before.settings.get(_MOMENT) if before else None
    try:
        return datetime.fromisoformat(told) if told else None
    except (TypeError, ValueError):
        raise _no_settings(out, f"is not what titan infer wrote: {told!r:.60} is no time") from None
