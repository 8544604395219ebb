"""The settings file of a results file: what the results depend on, so that a rerun never mixes two settings.

It is written before the first result, while the results file is locked and empty.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, ConfigError, list_offenders
from converters.families.args import args_to_json
from converters.store.json_file import read_json
from converters.store.replace_file import replacing
from titan_tools.infer.task import Work

_VERSION = 1
_MOMENT = "time in the prompts"
OTHER_OUT = "--out ANOTHER_FILE"


@dataclass(frozen=True, slots=True)
class ResultsSettings:
    """What results depend on, by option or plain name, as JSON values.

    `checkpoint` is the path of the weights: shown in messages, not compared. Not recorded: the number of samples, which
    may grow, and options that change no token in fp32 (--tp, --batch-size, --compile).
    """

    checkpoint: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def results_settings(work: Work) -> ResultsSettings:
    """The settings of a run with --out, whose `work` has an origin."""
    request, sampling, template, origin = work.request, work.request.sampling, work.template, work.origin
    assert origin is not None
    settings: dict[str, Any] = {
        "weights": origin.weights,
        "tokenizer": origin.tokenizer,
        **{f"model.{name}": value for name, value in args_to_json(work.args).items()},
        "--score": request.score,
        "--dtype": work.dtype,
        "--quantize": request.quantize,
        "--tp": work.tp if request.quantize else None,  # each rank quantizes its own slices
        "--logprobs": request.logprobs,
        "--special-tokens": request.special_tokens,
    }
    if request.score:
        settings["--context"] = request.context or work.args.max_seq_len
    else:
        settings |= {
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
            _MOMENT: template.moment.isoformat() if template and template.depends_on_current_time else None,
        }
    return ResultsSettings(str(origin.checkpoint), json.loads(json.dumps(settings)))


def settings_path(out: Path) -> Path:
    """The settings file: next to the results file itself if `out` is a link."""
    return Path(os.path.realpath(out) + ".settings.json")


def read_results_settings(out: Path) -> ResultsSettings | None:
    """The settings of the results in `out`; None without a settings file. Raises ConfigError for any other content."""
    path = settings_path(out)
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        if content.get("version") == _VERSION and isinstance(content.get("settings"), dict):
            return ResultsSettings(str(content.get("checkpoint")), content["settings"])
        problem = f"it has no settings of version {_VERSION}"
    except CheckpointError as error:
        problem = error.message
    raise _damaged(out, problem)


def _damaged(out: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{settings_path(out)} is not a settings file of titan infer: {problem}",
        hint=f"it must record the weights and options of the results in {out}; nothing was written",
        tries=[OTHER_OUT],
    )


def write_results_settings(out: Path, settings: ResultsSettings) -> None:
    """Write the settings file of `out` atomically. Raises ConfigError if it cannot be written."""
    path = settings_path(out)
    content = {"version": _VERSION, "checkpoint": settings.checkpoint, "settings": dict(settings.settings)}
    try:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint=f"no result is in {out} yet") from None


def require_same_settings(before: ResultsSettings | None, now: ResultsSettings, *, out: Path) -> None:
    """Raise ConfigError with every setting in which this run differs from the run that wrote the results in `out`.

    `before`: None if the settings file is missing.
    """
    path = settings_path(out)
    if before is None:
        raise ConfigError(
            f"{out} holds results, but {path} is missing",
            hint="--out writes that file to record the weights and options of the results: move it back. Without it, "
            "as with results that were printed to standard output, they cannot be continued; nothing was written",
            tries=[OTHER_OUT],
        )
    old, new = before.settings, now.settings
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if not new.get("--temperature") and "--seed" in names:  # greedy decoding uses no seed
        names.remove("--seed")
    if "--score" in names:  # most other settings exist for one kind of result only
        names = [name for name in names if name in old and name in new]
    if names:
        differences = [f"{name}: {_show(name, before)} there, {_show(name, now)} here" for name in names]
        raise ConfigError(
            f"{out} holds results of other settings:" + list_offenders(differences, most=100),
            hint=f"a rerun needs the settings of the first run, recorded in {path}; nothing was written",
            tries=[OTHER_OUT],
        )


def _show(name: str, settings: ResultsSettings) -> str:
    value = settings.settings.get(name)
    if name == "weights":
        return f"those of {settings.checkpoint} ({value})"
    if value is None or isinstance(value, bool):
        return "given" if value else "not given"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def recorded_moment(out: Path | None) -> datetime | None:
    """The time that the chat template used for the results in `out`; None if there are none."""
    if out is None or not out.is_file() or not out.stat().st_size:
        return None
    before = read_results_settings(out)
    moment = before.settings.get(_MOMENT) if before else None
    try:
        return datetime.fromisoformat(moment) if moment else None
    except (TypeError, ValueError):
        raise _damaged(out, f"{_MOMENT}: {moment!r:.60} is not a time") from None
