"""What a checkpoint's generation_config.json asks for, beside stop tokens: followed with --generation-config, or named.

As transformers' `generate` reads it, its defaults included (top_k is 50 where a file that samples names none).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converters.assets import find_assets
from converters.errors import CheckpointError, ConfigError, UnsupportedError, list_offenders
from converters.json_file import read_json
from converters.model_info import ModelInfo
from converters.names import HF_GENERATION_CONFIG
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.request import Request

# What it takes to sample: field → what transformers takes where it is not there, and what switches it off
_SAMPLING = {"temperature": (1.0, None), "top_k": (50, 0), "top_p": (1.0, 1.0), "min_p": (None, 0.0)}
_LENGTHS = ("max_new_tokens", "max_length")
FOLLOWED = {"do_sample", *_SAMPLING, "repetition_penalty", *_LENGTHS}
ALWAYS_FOLLOWED = {"eos_token_id", "stop_strings", "bos_token_id"}
# Fields that titan cannot follow → the value, beside null, with which they have no effect
REFUSED = {
    "begin_suppress_tokens": [], "bad_words_ids": [], "constraints": None, "diversity_penalty": 0.0,
    "dola_layers": None, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "exponential_decay_length_penalty": None,
    "force_words_ids": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "guidance_scale": 1,
    "max_time": None, "min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1,
    "num_beams": 1, "num_return_sequences": 1, "penalty_alpha": 0.0, "sequence_bias": None, "suppress_tokens": [],
    "token_healing": False, "top_h": None, "typical_p": 1.0, "use_mtp": False, "watermarking_config": None,
}  # fmt: skip
_OF_SAMPLING_ALONE = {"epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"}
# Fields that change no token: of beams, encoder-decoders and output, and of speculation, which must not change any
WITHOUT_EFFECT = {
    "_commit_hash", "_from_model_config", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_ensemble_weight", "assistant_lookbehind", "cache_config", "cache_implementation", "compile_config",
    "continuous_batching_config", "decoder_start_token_id", "disable_compile", "early_stopping",
    "is_assistant", "length_penalty", "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "pad_token_id",
    "prefill_chunk_size", "prompt_lookup_num_tokens", "remove_invalid_values", "renormalize_logits",
    "return_dict_in_generate", "speculation_type", "target_lookbehind", "transformers_version", "use_cache",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The content of a generation_config.json, without what is null."""

    path: Path
    fields: Mapping[str, Any]

    @property
    def samples(self) -> bool:
        return self._value("do_sample", bool, False)

    def number(self, name: str, otherwise: float | None) -> float | None:
        return self._value(name, (int, float), otherwise)

    def length(self, name: str) -> int | None:
        found = self.number(name, None)
        if found is not None and (found != int(found) or found < 1):
            raise CheckpointError(f"{self.path}: {name} is {found}, not a number of tokens")
        return None if found is None else int(found)

    def _value(self, name: str, kinds: type | tuple[type, ...], otherwise: Any) -> Any:
        value = self.fields.get(name, otherwise)
        if value is not otherwise and (not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool)):
            raise CheckpointError(
                f"{self.path}: {name} is {value!r:.60}, not a {'boolean' if kinds is bool else 'number'}"
            )
        return value

    def not_followed(self, *, explicit: tuple[str, ...] = ()) -> list[str]:
        """The fields that would change what `generate` makes, with their values, beside what is always followed."""
        names = []
        for name, value in self.fields.items():
            if name in explicit:
                continue
            if name == "do_sample":
                asks = self.samples
            elif name in _SAMPLING:
                asks = self.samples and value not in (_SAMPLING[name][1], 1.0 if name == "temperature" else None)
            elif name == "repetition_penalty":
                asks = value != 1
            else:
                asks = name in _LENGTHS or name in self._impossible()
            if asks:
                names.append(f"{name} {value!r:.60}")
        return names

    def _impossible(self) -> list[str]:
        return [
            name
            for name, value in self.fields.items()
            if name in REFUSED and value != REFUSED[name] and (self.samples or name not in _OF_SAMPLING_ALONE)
        ]

    def refuse_impossible(self) -> None:
        """Raise UnsupportedError with every field that titan cannot follow."""
        if impossible := self._impossible():
            raise UnsupportedError(
                f"{self.path} asks for what titan's decoding cannot do:"
                + list_offenders([f"{name} {self.fields[name]!r:.60}" for name in impossible]),
                hint="without --generation-config they are left out, and a note says so",
            )

    def unknown(self) -> list[str]:
        """Fields that transformers does not know either, or that are newer than this list."""
        return sorted(self.fields.keys() - FOLLOWED - ALWAYS_FOLLOWED - REFUSED.keys() - WITHOUT_EFFECT)


def read_generation_config(folder: Path, info: ModelInfo) -> GenerationConfig | None:
    """The checkpoint's, else that of the tokenizer's folder; None where there is none."""
    path = info.assets.get(HF_GENERATION_CONFIG) or find_assets(folder).get(HF_GENERATION_CONFIG)
    if path is None:
        return None
    return GenerationConfig(path, {name: value for name, value in read_json(path).items() if value is not None})


def follow(config: GenerationConfig | None, request: Request, *, folder: Path, vocab_size: int) -> Request:
    """The request with what the file asks for, where no flag says otherwise (`request.explicit`).

    Raises ConfigError where there is no such file, UnsupportedError with the fields that cannot be followed.
    """
    if config is None:
        raise ConfigError(f"--generation-config: {folder} has no {HF_GENERATION_CONFIG}", hint="leave the option out")
    config.refuse_impossible()
    given, asked = request.explicit, request.sampling
    own_temperature = config.number("temperature", 1.0) if config.samples else 0.0
    if config.samples and own_temperature <= 0:
        raise CheckpointError(f"{config.path}: do_sample with temperature {own_temperature}; it must be above 0")
    temperature = asked.temperature if "temperature" in given else own_temperature
    values: dict[str, float | None] = {"temperature": float(temperature)}
    for name in ("top_k", "top_p", "min_p"):
        default, off = _SAMPLING[name]
        own = config.number(name, default) if temperature > 0 else None
        values[name] = getattr(asked, name) if name in given else None if own in (None, off) else own
    if values["top_k"] is not None and "top_k" not in given:
        values["top_k"] = min(int(values["top_k"]), vocab_size)
    penalty = asked.repetition_penalty if "repetition_penalty" in given else config.number("repetition_penalty", 1.0)
    new, total = (config.length(name) for name in _LENGTHS)
    if "max_new_tokens" in given:
        new, total = request.max_new_tokens, None
    sampling: Sampling = replace(asked, repetition_penalty=float(penalty), **values)
    # transformers takes the number of new tokens where both are there
    return replace(request, sampling=sampling, max_new_tokens=new, max_length=total if new is None else None)


def note_on(config: GenerationConfig | None, request: Request) -> str:
    """A line on what of the file is followed and what is not; "" where it has nothing beside stop tokens."""
    if config is None or request.score:
        return ""
    asks = config.not_followed(explicit=() if request.generation_config else request.explicit)
    unknown = config.unknown()
    unknown_part = f"; not known here, and without effect: {', '.join(unknown)}" if unknown else ""
    if request.generation_config:
        if request.sampling.temperature > 0 and "top_k" not in {*config.fields, *request.explicit}:
            asks.append(f"top_k {request.sampling.top_k} (what transformers takes where it is not named)")
        won = [name for name in request.explicit if name in config.fields]
        flags = f"; from the command line instead: {', '.join(won)}" if won else ""
        return f"{config.path.name} is followed: {', '.join(asks) or 'greedy decoding'}{flags}{unknown_part}"
    if not asks:
        return ""
    ends = "stop tokens are" if not request.ignore_eos else "nothing is"
    return (
        f"{config.path.name}: {ends} followed; not followed: {', '.join(asks)} (--generation-config follows the file)"
    )
