"""The error for what was named in place of a config: a model's folder or config.json, a name on the Hub, another file.

It says what was found there, and which preset and flavor have the same numbers. Torch-free.
"""

import difflib
import re
import shlex
from pathlib import Path

from converters.common.errors import ConfigError, TitanError
from converters.containers.dcp_names import DATA_SUFFIX
from converters.families.args import DecoderArgs, ModelArgs, computed_numbers, describe_size
from converters.families.base import Family
from converters.families.registry import all_families, read_hf_config, read_meta_params
from converters.store.json_file import read_json
from trainer.config.preset import preset_models, preset_names

_HUB_NAME = re.compile(r"[\w][\w.\-]*/[\w][\w.\-]*")
_OTHERS = {  # by the end of their names
    ".json": "JSON", ".yaml": "YAML", ".yml": "YAML", ".py": "Python", ".safetensors": "weights", ".bin": "weights",
    ".pt": "weights", ".pth": "weights", ".ckpt": "weights", ".gguf": "weights", DATA_SUFFIX: "weights", ".md": "text",
}  # fmt: skip
# Numbers that decide neither a parameter's shape nor what a step keeps
_WITHOUT_SHAPE = ("max_seq_len", "rope_theta", "rope_scaling", "norm_eps", "initial_std")
_TOML = "titan's configs are TOML files and presets"


def not_a_config(source: str) -> ConfigError | None:
    """The error for a path or name that is no config; None if it may be a TOML file."""
    path = Path(source)
    if path.is_dir():
        return _of_folder(path)
    kind = _OTHERS.get(path.suffix.lower())
    if path.is_file():
        return _of_file(path, kind) if kind else None
    if path.exists() or source.startswith("--"):
        return None
    return _of_nothing(source)


def _of_folder(folder: Path) -> ConfigError:
    from converters.model.model_info import find_model_file

    try:
        file = find_model_file(folder)
    except TitanError as error:  # an incomplete repository of the Hub's cache
        return ConfigError(f"{folder} is a folder, not a config file: {error.message}", hint=error.hint)
    if file is not None:
        return _of_model(file, f"{folder} is a model's folder, not a config file", weights=str(folder))
    files = [str(path) for path in sorted(folder.glob("*.toml"))[:3]]
    return ConfigError(f"{folder} is a folder, not a config file", hint=_TOML, tries=files or _commands("llama3_8b"))


def _of_file(path: Path, kind: str) -> ConfigError:
    from converters.model.model_info import find_model_file

    what = f"{path} is {'a file of weights' if kind == 'weights' else kind}, not a config file"
    if kind == "weights" and (file := find_model_file(path)) is not None:
        return _of_model(file, what, weights=str(path.parent))
    if kind == "JSON":
        return _of_model(path, what, weights=str(path.parent))
    return ConfigError(what, hint=_TOML, tries=_commands("llama3_8b"))


def _of_nothing(source: str) -> ConfigError:
    presets = preset_names()
    is_hub_name = _HUB_NAME.fullmatch(source) is not None and not source.endswith(".toml")
    wanted = _squeezed(source.rpartition("/")[2] if is_hub_name else Path(source).stem)
    squeezed = {_squeezed(name): name for name in presets}
    near = [squeezed[name] for name in difflib.get_close_matches(wanted, squeezed, n=2, cutoff=0.7)]
    hint = f"presets: {', '.join(presets)}"
    if is_hub_name:
        hint = f"if it is a name on the Hugging Face Hub: {_TOML}, and weights are fetched by `titan download`; {hint}"
    tries = _commands(near[0]) if is_hub_name and near else [f"titan config show {name}" for name in near]
    return ConfigError(f"{source}: no such config file or preset", hint=hint, tries=tries)


def _squeezed(name: str) -> str:
    return re.sub(r"meta|instruct|base|chat|hf|it$|[^a-z0-9]", "", name.lower())


def _of_model(file: Path, what: str, *, weights: str) -> ConfigError:
    """With the model that a config.json, params.json or titan_model.json describes, and the flavor of its numbers."""
    try:
        family, args = _described(file)
    except TitanError as error:
        return ConfigError(f"{what}: {error.message}", hint=f"{_TOML}; `titan models` lists the models", tries=())
    numbers = describe_size(args)
    if isinstance(args, DecoderArgs):
        numbers += f", {args.num_heads} heads, vocabulary {args.vocab_size:,}"
    message = f"{what}: its {file.name} is of a {family.name} model with {numbers}"
    flavor, differing = _nearest_flavor(family, args)
    shaped = [key for key in differing if key not in _WITHOUT_SHAPE]
    if shaped:
        return ConfigError(
            message,
            hint=f"{_TOML}, and a model's numbers come from model.flavor: no flavor of {family.name} has these"
            f" (the nearest, {flavor}, differs in {', '.join(shaped)}); a module in experimental.custom_import"
            " registers others (docs/extend.md)",
            tries=_commands(*_words(family.name, flavor)),
        )
    differs = f" but for {', '.join(differing)}" if differing else ""
    words = _words(family.name, flavor)
    tries = _commands(*words)
    if not differing:
        tries.append(" ".join(["titan train", *words, f"--checkpoint.initial_load_path {shlex.quote(weights)}"]))
    return ConfigError(message, hint=f"{_TOML}; its numbers are those of flavor {flavor}{differs}", tries=tries)


def _described(file: Path) -> tuple[Family, ModelArgs]:
    from converters.common.names import META_PARAMS, MODEL_INFO
    from converters.families.model_numbers import check_args
    from converters.model.model_info import read_model_info
    from converters.model.multimodal import split_config

    if file.name == MODEL_INFO:
        info = read_model_info(file.parent)
        return all_families()[info.family], info.args
    content = read_json(file)
    is_hf = "architectures" in content or "model_type" in content
    if not is_hf and file.name != META_PARAMS:
        raise ConfigError("it describes no model")
    family, args = read_hf_config(split_config(content)[0]) if is_hf else read_meta_params(content, {})
    check_args(args, what=file.name)
    return family, args


def _nearest_flavor(family: Family, args: ModelArgs) -> tuple[str, list[str]]:
    """The flavor whose shapes are the same, else the one nearest in size; and its numbers that differ."""
    wanted = computed_numbers(args)
    differing = {}
    for flavor, flavor_args in family.flavors.items():
        numbers = computed_numbers(flavor_args)
        differing[flavor] = [key for key in wanted if wanted[key] != numbers.get(key) and key != "max_seq_len"]

    def distance(flavor: str) -> tuple[bool, float, int]:
        size = family.num_parameters(family.flavors[flavor]) / family.num_parameters(args)
        return any(key not in _WITHOUT_SHAPE for key in differing[flavor]), max(size, 1 / size), len(differing[flavor])

    nearest = min(differing, key=distance)
    return nearest, differing[nearest]


def _words(family: str, flavor: str) -> list[str]:
    """The preset of a flavor; else one with the flavor set."""
    presets = preset_models()
    if exact := [name for name, model in presets.items() if model == (family, flavor)]:
        return [min(exact, key=len)]
    alike = [name for name, model in presets.items() if model[0] == family]
    names = [] if alike else [f"--model.name {family}"]
    return [min(alike or ["llama3_8b"], key=len), *names, f"--model.flavor {flavor}"]


def _commands(*words: str) -> list[str]:
    config = " ".join(words)
    return [f"titan estimate-memory {config} --world-size 8", f"titan config show {config}"]
