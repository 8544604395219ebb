"""A checkpoint's generation_config.json: which fields --generation-config follows, and a note on them without it.

They mean what they mean to transformers' `generate`, defaults included (top_k is 50 where a file samples without one).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, ConfigError, UnsupportedError, list_offenders
from converters.common.names import HF_GENERATION_CONFIG
from converters.model.model_info import ModelInfo
from converters.store.json_file import read_json
from converters.tokenizers.assets import find_assets
from titan_tools.infer.request import Request

# Sampling fields: transformers' default, and the value without effect
_SAMPLING: dict[str, tuple[float | None, float | None]] = {
    "temperature": (1.0, None),
    "top_k": (50, 0),
    "top_p": (1.0, 1.0),
    "min_p": (None, 0.0),
}
_LENGTHS = ("max_new_tokens", "max_length")
FOLLOWED = {"do_sample", *_SAMPLING, "repetition_penalty", *_LENGTHS}
ALWAYS_FOLLOWED = {"eos_token_id", "stop_strings", "bos_token_id"}
# Fields that titan does not support → the value, besides null, without effect
UNSUPPORTED: dict[str, Any] = {
    "begin_suppress_tokens": [], "bad_words_ids": [], "constraints": None, "diversity_penalty": 0.0,
    "dola_layers": None, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "exponential_decay_length_penalty": None,
    "force_words_ids": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "guidance_scale": 1,
    "max_time": None, "min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1,
    "num_beams": 1, "num_return_sequences": 1, "penalty_alpha": 0.0, "sequence_bias": None, "suppress_tokens": [],
    "token_healing": False, "top_h": None, "typical_p": 1.0, "use_mtp": False, "watermarking_config": None,
}  # fmt: skip
_ONLY_WHEN_SAMPLING = {"epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"}
# Fields that change no token: of beam search, encoder-decoders, output, and speculative decoding
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
    """The content of a generation_config.json, without null values."""

    path: Path
    fields: Mapping[str, Any]

    @property
    def samples(self) -> bool:
        value = self.fields.get("do_sample", False)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: do_sample is {value!r:.60}, not a boolean")
        return value

    def number(self, name: str) -> float | None:
        """The value of a field; None without the field."""
        value = self.fields.get(name)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise CheckpointError(f"{self.path}: {name} is {value!r:.60}, not a number")
        return value

    def length(self, name: str) -> int | None:
        found = self.number(name)
        if found is not None and (found != int(found) or found < 1):
            raise CheckpointError(f"{self.path}: {name} is {found}, not a number of tokens")
        return None if found is None else int(found)

    def effective_fields(self, *, explicit: tuple[str, ...] = ()) -> list[str]:
        """The fields that change tokens, with their values, without those that are always followed."""
        names = []
        for name, value in self.fields.items():
            if name in explicit:
                continue
            if name == "do_sample":
                has_effect = self.samples
            elif name in _SAMPLING:
                has_effect = self.samples and value not in (_SAMPLING[name][1], 1.0 if name == "temperature" else None)
            elif name == "repetition_penalty":
                has_effect = value != 1
            else:
                has_effect = name in _LENGTHS or name in self._unsupported()
            if has_effect:
                names.append(f"{name} {value!r:.60}")
        return names

    def _unsupported(self) -> list[str]:
        return [
            name
            for name, value in self.fields.items()
            if name in UNSUPPORTED and value != UNSUPPORTED[name] and (self.samples or name not in _ONLY_WHEN_SAMPLING)
        ]

    def require_supported(self) -> None:
        """Raise UnsupportedError with every field that titan does not support."""
        if unsupported := self._unsupported():
            raise UnsupportedError(
                f"{self.path} has fields that titan's decoding does not support:"
                + list_offenders([f"{name} {self.fields[name]!r:.60}" for name in unsupported]),
                hint="without --generation-config they are ignored, and a note says so",
            )

    def unknown(self) -> list[str]:
        """Fields that transformers does not have, or that are newer than these lists."""
        return sorted(self.fields.keys() - FOLLOWED - ALWAYS_FOLLOWED - UNSUPPORTED.keys() - WITHOUT_EFFECT)


def read_generation_config(folder: Path, info: ModelInfo) -> GenerationConfig | None:
    """The checkpoint's file, else that in the tokenizer's folder; None without one."""
    path = info.assets.get(HF_GENERATION_CONFIG) or find_assets(folder).get(HF_GENERATION_CONFIG)
    if path is None:
        return None
    return GenerationConfig(path, {name: value for name, value in read_json(path).items() if value is not None})


def follow(config: GenerationConfig | None, request: Request, *, folder: Path, vocab_size: int) -> Request:
    """The request with the file's values for options that were not given (`request.explicit`).

    Raises ConfigError without a file, UnsupportedError with the fields that titan does not support.
    """
    if config is None:
        raise ConfigError(f"--generation-config: {folder} has no {HF_GENERATION_CONFIG}", hint="leave the option out")
    config.require_supported()
    explicit, requested = request.explicit, request.sampling
    temperature = requested.temperature
    if "temperature" not in explicit:
        temperature = float(_or(config.number("temperature"), 1.0)) if config.samples else 0.0
        if config.samples and temperature <= 0:
            raise CheckpointError(f"{config.path}: do_sample with temperature {temperature}; it must be above 0")

    def filter_value(name: str) -> Any:
        default, off = _SAMPLING[name]
        value = _or(config.number(name), default) if temperature > 0 else None
        return getattr(requested, name) if name in explicit else None if value in (None, off) else value

    top_k = filter_value("top_k")
    if top_k is not None and "top_k" not in explicit:
        top_k = min(int(top_k), vocab_size)
    penalty = requested.repetition_penalty
    if "repetition_penalty" not in explicit:
        penalty = float(_or(config.number("repetition_penalty"), 1.0))
    new, total = (config.length(name) for name in _LENGTHS)
    if "max_new_tokens" in explicit:
        new, total = request.max_new_tokens, None
    sampling = replace(
        requested,
        temperature=temperature,
        top_k=top_k,
        top_p=filter_value("top_p"),
        min_p=filter_value("min_p"),
        repetition_penalty=penalty,
    )
    # With both, transformers uses the number of new tokens
    return replace(request, sampling=sampling, max_new_tokens=new, max_length=total if new is None else None)


def _or(value: float | None, default: Any) -> Any:
    return default if value is None else value


def note_on(config: GenerationConfig | None, request: Request) -> str:
    """A note on the fields that are (not) followed; "" if the file has only stop tokens."""
    if config is None or request.score:
        return ""
    fields = config.effective_fields(explicit=() if request.generation_config else request.explicit)
    unknown = config.unknown()
    unknown_part = f"; unknown fields, without effect: {', '.join(unknown)}" if unknown else ""
    if request.generation_config:
        if request.sampling.temperature > 0 and "top_k" not in {*config.fields, *request.explicit}:
            fields.append(f"top_k {request.sampling.top_k} (transformers' default)")
        overridden = [name for name in request.explicit if name in config.fields]
        flags = f"; from the command line instead: {', '.join(overridden)}" if overridden else ""
        return f"{config.path.name} is followed: {', '.join(fields) or 'greedy decoding'}{flags}{unknown_part}"
    if not fields:
        return ""
    ends = "stop tokens are" if not request.ignore_eos else "nothing is"
    return (
        f"{config.path.name}: {ends} followed; not followed: {', '.join(fields)} (--generation-config follows the file)"
    )
