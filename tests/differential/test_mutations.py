"""Configs of titan's families with one or two fields changed, through convert, back and infer."""

import json
from pathlib import Path

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.differential.compare import REFUSED, SAME, UNCLEAR, UNJUDGED, assert_same_or_refused, outcome_of
from tests.differential.makers import tiny_config, tiny_model
from tests.differential.mutations import ABSENT, Mutation, odd_mutations, single_mutations, with_pairs
from tests.differential.sampling import every

FAMILIES = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "deepseek_v3": DeepseekV3Config,
    "deepseek_v2": DeepseekV2Config,
    "gpt_oss": GptOssConfig,
    "llama4_text": Llama4TextConfig,
}
NUM_PAIRS = 80
_TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
BASES = {
    **{family: _TOKENS | {"head_dim": 8} for family in ("llama", "qwen3", "qwen3_moe")},
    "deepseek_v3": _TOKENS | _GROUPS,
    "deepseek_v2": _TOKENS | _GROUPS | {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    # Windows, chunks and steps of the temperature that the prompt crosses
    "gpt_oss": _TOKENS | {"head_dim": 8, "sliding_window": 6},
    "llama4_text": _TOKENS | {"head_dim": 8, "attention_chunk_size": 6, "floor_scale": 5},
}
CASES = [
    (family, place, mutation)
    for family, config_class in FAMILIES.items()
    for place in ("object", "file")
    for mutation in with_pairs(single_mutations(config_class), num_pairs=NUM_PAIRS)
]
CASES += [
    (name, "file", mutation) for name, config_class in FAMILIES.items() for mutation in odd_mutations(config_class)
]


@pytest.mark.parametrize(("family", "place", "mutation"), every(CASES, num=14))
def test_mutation(family, place, mutation, tmp_path, count):
    problem = (_saved_from_object if place == "object" else _changed_on_disk)(tmp_path / "src", family, mutation)
    if problem:
        count("mutations", "transformers builds no such model")
        return
    accepted = mutation.must_be_accepted(family, in_file=place == "file")
    outcome = outcome_of(tmp_path / "src", tmp_path / "scratch", names=mutation.names, accepted=accepted)
    count("mutations", outcome.kind)
    # What transformers does not load titan may read in another way, as long as it says no wrong number
    assert_same_or_refused(outcome, allowed=(SAME, REFUSED, UNJUDGED, *[UNCLEAR] * mutation.is_odd))


def _saved_from_object(folder: Path, family: str, mutation: Mutation) -> str:
    """A model of the changed config, saved by transformers; why it makes none, or ""."""
    try:
        model = tiny_model(tiny_config(family, **BASES[family] | mutation.values))
        model.save_pretrained(folder)
    except Exception as error:  # a value that its class refuses, of whatever type its error is
        return f"{type(error).__name__}: {error}"
    return ""


def _changed_on_disk(folder: Path, family: str, mutation: Mutation) -> str:
    """A plain model whose config.json somebody edited."""
    tiny_model(tiny_config(family, **BASES[family])).save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text()) | mutation.values
    path.write_text(json.dumps({key: value for key, value in content.items() if value != ABSENT}))
    return ""
