"""Load a config: defaults, then a TOML file or preset, then the command line. All problems are reported together.

Imports neither torch nor numpy, so that errors appear quickly, before any rank starts.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from converters.common.errors import ConfigError, list_offenders
from converters.families.registry import all_families
from trainer.config.command_line import read_overrides
from trainer.config.custom_import import import_custom
from trainer.config.preset import find_preset
from trainer.config.refused import REFUSED, REFUSED_EXTENSIONS, REFUSED_FAMILIES, REFUSED_VALUES
from trainer.config.renamed import GONE, READ_AS_RENAMED, RENAMED, RENAMED_VALUES
from trainer.config.sections import Config, kinds, registered_sections, sections
from trainer.config.toml_file import Setting, read_toml
from trainer.config.types import fit

DEFAULT = "default"


def load_config(source: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The config of a TOML file or preset with overrides typed as `--section.key value`.

    Raises ConfigError that lists every unknown key, wrong value and uncovered feature, with file and line.
    """
    settings = _as_meant(_read(source))
    config, found = _merge(settings, overrides)
    if custom := config.experimental.custom_import:
        others = [(key, problem) for key, problem in found if not _may_be_registered(key)]
        if not others:
            import_custom(custom)
            config, found = _merge(settings, overrides)
        else:  # the module that is not imported then may register the section, and the family
            found = others
    problems = [problem for _, problem in found]
    if not (custom and problems):
        problems += _model_problems(config)
    if problems:
        raise _error(source, problems, upgradable=any(is_older(key, s.value) for key, s in settings.items()))
    return config


def _merge(settings: Mapping[str, Setting], overrides: Sequence[str]) -> tuple[Config, list[tuple[str, str]]]:
    """The config of a file's settings and overrides without those that have a problem, and the problems by key."""
    typed, problems = read_overrides(overrides, kind_of=_kind_of, unknown=_unknown_key)
    checked = [(key, s.origin, problem_of(key, s)) for key, s in [*settings.items(), *typed.items()]]
    problems = [(key, f"{origin}: {problem}") for key, origin, problem in checked if problem] + problems
    merged = {**settings, **typed}
    good = {key: setting for key, setting in merged.items() if key not in REFUSED and not problem_of(key, setting)}
    values = {key: fit(_kind_of(key), setting.value) for key, setting in good.items()}
    return _build(values, {key: setting.origin for key, setting in merged.items()}), problems


def _may_be_registered(key: str) -> bool:
    """Whether a key is of a section that a module may register."""
    section = key.rpartition(".")[0]
    return section not in ("", *sections()) and key not in (*REFUSED, *RENAMED, *GONE)


def _as_meant(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """The settings of a file with READ_AS_RENAMED replaced, which the origin says."""
    key, old = READ_AS_RENAMED
    setting = settings.get(key)
    if setting is None or not isinstance(setting.value, list) or old not in setting.value:
        return dict(settings)
    now = [RENAMED_VALUES[READ_AS_RENAMED] if item == old else item for item in setting.value]
    return {**settings, key: Setting(now, f"{setting.origin}, called {old} there")}


def origins(config: Config) -> dict[str, Setting]:
    """Every key of the config in the order of its sections, with its value and where that came from."""
    return {
        f"{section}.{f.name}": Setting(getattr(record, f.name), config.origins.get(f"{section}.{f.name}", DEFAULT))
        for section, record in by_section(config).items()
        for f in fields(record)
    }


def by_section(config: Config) -> dict[str, Any]:
    """Each section's record by its name in TOML."""
    built_in = {section: getattr(config, attribute) for section, (attribute, _) in sections().items()}
    return built_in | {name: config.section(record) for name, record in registered_sections.items()}


def _read(source: Path | str) -> dict[str, Setting]:
    if preset := None if Path(source).is_file() else find_preset(str(source)):
        return read_toml(preset, shown_as=f"preset {source}")
    if str(source).startswith("--"):
        raise ConfigError(f"the config comes before the overrides, but {source!r} came first")
    return read_toml(Path(source))


def _kind_of(key: str) -> Any | None:
    return kinds().get(key) or (REFUSED[key].kind if key in REFUSED else None)


def is_known(key: str) -> bool:
    """Whether the vocabulary has the key, supported or refused with a reason."""
    return _kind_of(key) is not None or _extension(key) != ""


def is_older(key: str, value: Any) -> bool:
    """Whether the key, or its value, is from an earlier vocabulary, renamed or removed since."""
    items = value if isinstance(value, list) else [value]
    return key in RENAMED or key in GONE or any(isinstance(i, str) and (key, i) in RENAMED_VALUES for i in items)


def problem_of(key: str, setting: Setting) -> str:
    """The problem of one setting; empty if there is none."""
    kind = _kind_of(key)
    if kind is None:
        return f"{key}: {_unknown_key(key)}"
    shown = f"{key} = {_shown(setting.value)}"
    if isinstance(setting.value, str) and (key, setting.value) in REFUSED_VALUES:
        return f"{shown}: {REFUSED_VALUES[key, setting.value]}"
    try:
        value = fit(kind, setting.value)
    except ValueError as allowed:
        items = setting.value if isinstance(setting.value, list) else [setting.value]
        now = [f"`{RENAMED_VALUES[key, i]}`" for i in items if isinstance(i, str) and (key, i) in RENAMED_VALUES]
        reasons = [REFUSED_VALUES[key, i] for i in items if isinstance(i, str) and (key, i) in REFUSED_VALUES]
        if reasons:
            return f"{shown}: {'; '.join(reasons)}"
        return f"{shown}: " + (f"is called {' and '.join(now)} now" if now else f"must be {allowed}")
    refused = REFUSED.get(key)
    if refused and refused.harmless is not None and value not in refused.harmless:
        return f"{shown}: {refused.reason}"
    return ""


def _unknown_key(key: str) -> str:
    """A message for an unknown key: its new name, or the nearest one."""
    if key in RENAMED:
        return f"is called `{RENAMED[key]}` now"
    if key in GONE:
        return f"there is no such key any more: {GONE[key][1]}"
    if extension := _extension(key):
        return extension
    keys = [*kinds(), *REFUSED]
    section, _, last = key.rpartition(".")
    if key in (*sections(), *registered_sections):
        return f"that is a section; its keys: {', '.join(name for name in kinds() if name.rpartition('.')[0] == key)}"
    if key in _SHORT:
        return f"no such key; did you mean `{_SHORT[key]}`?"
    same_name = [name for name in keys if name.rpartition(".")[2] == last]
    if section == "model" and not same_name:
        of_model = {name.rpartition(".")[2]: name for name in keys if name.startswith("model.")}
        near = [of_model[name] for name in difflib.get_close_matches(last, of_model, n=1, cutoff=0.7)]
        return f"no such key; did you mean `{near[0]}`?" if near else _NUMBERS_OF_MODEL
    near = same_name or difflib.get_close_matches(key, keys, n=1, cutoff=0.7)
    if not near:  # the section differs more than the name
        last_names = {name.rpartition(".")[2]: name for name in reversed(keys)}
        near = [last_names[name] for name in difflib.get_close_matches(last, last_names, n=1, cutoff=0.7)]
    if near:
        return f"no such key; did you mean `{near[0]}`?"
    if not section:
        return "no such option, and no such key: keys are `--section.key`, and `titan config show` lists them"
    return "no such key; `titan config show` lists them"


_NUMBERS_OF_MODEL = (
    "no such key: a model's numbers come from its flavor; `titan models` lists the flavors for model.flavor, and a"
    " module in experimental.custom_import registers others"
)
_SHORT = {
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "dp": "parallelism.data_parallel_shard_degree",
    "fsdp": "parallelism.data_parallel_shard_degree",
    "ac": "activation_checkpoint.mode",
    "batch_size": "training.local_batch_size",
}


def _extension(key: str) -> str:
    return next((reason for prefix, reason in REFUSED_EXTENSIONS.items() if key.startswith(prefix)), "")


def _shown(value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    def made(section: str, record: Any) -> Any:
        keys = {f.name: f"{section}.{f.name}" for f in fields(record)}
        return record(**{name: values[key] for name, key in keys.items() if key in values})

    built_in = {attribute: made(section, record) for section, (attribute, record) in sections().items()}
    given = {key.rpartition(".")[0] for key in values}
    registered = {name: made(name, record) for name, record in registered_sections.items() if name in given}
    return Config(**built_in, registered=registered, origins=dict(origins))


def _model_problems(config: Config) -> list[str]:
    """An unknown family or flavor; checked after custom_import."""
    families = all_families()
    model = config.model
    if model.name in REFUSED_FAMILIES and model.name not in families:
        where = config.origins.get("model.name", DEFAULT)
        return [f"{where}: model.name = {model.name!r}: {REFUSED_FAMILIES[model.name]}"]
    if model.name not in families:
        return [
            _no_such("model.name", model.name, families, config) + ", or be registered by experimental.custom_import"
        ]
    flavors = families[model.name].flavors
    return [] if model.flavor in flavors else [_no_such("model.flavor", model.flavor, flavors, config)]


def _no_such(key: str, value: str, known: Iterable[str], config: Config) -> str:
    return f"{config.origins.get(key, DEFAULT)}: {key} = {value!r}: must be one of {', '.join(known)}"


def _error(source: Path | str, problems: list[str], *, upgradable: bool) -> ConfigError:
    tries = [f"titan config upgrade {source}"] if upgradable else []
    if len(problems) == 1:
        return ConfigError(problems[0], tries=tries)
    return ConfigError(f"{source}: {len(problems)} problems{list_offenders(problems, most=50)}", tries=tries)
