"""Read, check and write back the fields of config.json that a family's args do not hold."""

import json
from collections.abc import Mapping
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders, printable
from converters.families.args import ModelArgs
from converters.families.base import Family
from converters.tokenizers.assets import CLASS_DEFAULTS, TOKEN_IDS

# A family writes these with the class's defaults, and computes the same with any value
COSMETIC = (
    *("attention_dropout", "initializer_range", "use_cache", "pretraining_tp"),
    *("output_router_logits", "router_aux_loss_coef"),  # of a loss
)
# What describes the file or its writer. titan writes its own architectures, model_type and dtype; a path and a version
# of where the source was saved say nothing about its copy; quantized weights are refused or dequantized; and the code
# that auto_map names is not copied.
_NOT_CARRIED = {
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "transformers_version",
    "quantization_config",
    "auto_map",
    "transformers_weights",  # the name of the source's file
    "num_local_experts",  # transformers 5's spelling of num_experts
    "num_mtp_layers",  # and of num_nextn_predict_layers
}
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")  # written in the spellings of both transformers 4 and 5
_COUNTED = ("num_nextn_predict_layers",)  # of tensors: a config may state layers that are not there (see mtp.py)
_MOST_BYTES = 1 << 20  # of all such fields: config files are a few KB
# GenerationConfig's fields but the token ids. If there is no generation_config.json, transformers takes them from
# config.json; if there is one, it does not.
_GENERATION = """
max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams use_mtp
use_cache cache_implementation cache_config max_cache_len temperature top_k top_p min_p top_h typical_p epsilon_cutoff
eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids
renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
suppress_tokens begin_suppress_tokens sequence_bias token_healing guidance_scale watermarking_config
num_return_sequences output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
encoder_no_repeat_ngram_size decoder_start_token_id is_assistant num_assistant_tokens num_assistant_tokens_schedule
assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit
assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type compile_config disable_compile
continuous_batching_config low_memory penalty_alpha dola_layers diversity_penalty num_beam_groups constraints
force_words_ids prefill_chunk_size
"""


def read_untranslated(
    config: Mapping[str, Any],
    family: Family,
    args: ModelArgs,
    token_ids: Mapping[str, Any],
    *,
    carried_ids: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields of a config.json beyond `args`, without those that `fields_to_write` writes anyway.

    Of the token ids, those that differ from the copied generation config (`carried_ids`), except unset ones that have
    been replaced. Raises CheckpointError and UnsupportedError.
    """
    written = family.hf_config(args)
    _refuse_other_code(config, family, written)
    replaced = _replaced_ids(config, token_ids)
    fields = {}
    for key, value in config.items():
        if key in TOKEN_IDS:
            is_carried = key not in replaced and (key not in carried_ids or value != carried_ids[key])
        elif key in written:
            is_carried = key in COSMETIC and value != written[key]
        else:
            is_carried = key not in _NOT_CARRIED
        if is_carried:
            fields[key] = value
    require_without_effect(fields, family, args, what="config.json")
    return fields


def require_without_effect(fields: Any, family: Family, args: ModelArgs, *, what: str) -> None:
    """Raise CheckpointError if fields that should have no effect change the model, or are written by titan."""
    if not isinstance(fields, dict):
        raise CheckpointError(f"{what}: a JSON {type(fields).__name__}, not an object")
    if wrong := sorted(_NOT_CARRIED & fields.keys()):
        raise CheckpointError(f"{what}: titan writes these fields itself:{list_offenders(wrong)}")
    if (size := len(json.dumps(fields))) > _MOST_BYTES:
        raise CheckpointError(f"{what}: {size:,} bytes of fields that titan does not translate; a config has a few KB")
    written = family.hf_config(args)
    try:
        if family.args_from_hf_config(written | fields) == family.args_from_hf_config(written):
            return
        problem = "they change the model"
    except (CheckpointError, UnsupportedError) as error:
        problem = error.message
    raise CheckpointError(
        f"{what}: fields that should not change the model do: {problem}",
        hint=f"the fields: {', '.join(map(printable, fields))}",
    )


def fields_to_write(written: Mapping[str, Any], untranslated: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's content: the family's fields of the model, and the other fields as they were read."""
    others = {key: value for key, value in untranslated.items() if key not in written or key in COSMETIC}
    return dict(written) | others


def extra_generation_settings(untranslated: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of generation in a config.json, which transformers reads there if there is no generation_config.json."""
    found = {key: untranslated[key] for key in untranslated if key in _GENERATION.split()}
    return {key: value for key, value in found.items() if value is not None and (key, value) != ("use_cache", True)}


def read_stated_dtype(config: Mapping[str, Any]) -> str:
    """The element type that a config.json names; `torch_dtype` is the spelling before transformers 4.56."""
    stated = config.get("dtype") or config.get("torch_dtype")
    return stated.removeprefix("torch.") if isinstance(stated, str) and stated != "auto" else ""


def describe_rewritten(
    config: Mapping[str, Any], family: Family, args: ModelArgs, token_ids: Mapping[str, Any]
) -> list[str]:
    """Remarks on fields of a config.json that are written with another value, or not at all."""
    written = family.hf_config(args)
    changed = [
        f"{key} {config[key]!r:.200}, now {written[key]!r:.200}"
        for key in config
        if key in written and key not in (*COSMETIC, *_ROPE, *_COUNTED)
        if config[key] is not None and config[key] != written[key]
    ]
    remarks = [f"config.json: changed: {', '.join(changed)}"] if changed else []
    if replaced := _replaced_ids(config, token_ids):
        changes = ", ".join(f"{key} {token_ids[key]} for {config[key]}" for key in replaced)
        remarks.append(f"config.json: unset token ids are now the generation config's or tokenizer's: {changes}")
    if config.get("auto_map") is not None:
        remarks.append(
            f"config.json: auto_map names Python code, which is dropped; the model is read as {written['model_type']}, "
            "as transformers does without trust_remote_code"
        )
    return remarks


def _replaced_ids(config: Mapping[str, Any], token_ids: Mapping[str, Any]) -> list[str]:
    """Token ids of a config.json that are null or its class's default, if another file has others."""
    unset = [key for key in TOKEN_IDS if key in config and config[key] in (None, CLASS_DEFAULTS.get(key))]
    return [key for key in unset if token_ids.get(key, config[key]) != config[key]]


def _refuse_other_code(config: Mapping[str, Any], family: Family, written: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if transformers can load the model only by running the code in its folder.

    With a model_type of its own, transformers reads the folder as its own class unless it is given trust_remote_code.
    """
    known = (written.get("model_type"), *family.hf_model_types)
    if config.get("auto_map") is not None and config.get("model_type") not in known:
        raise UnsupportedError(
            f"config.json: model_type {config.get('model_type')!r} is defined by Python code in the folder (auto_map), "
            "which is not run",
            hint=f"if the model computes what {written.get('model_type')!r} does, set model_type to that in a copy and "
            "remove auto_map",
        )
