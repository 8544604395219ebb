"""Degrees: fitted to a world size, and every problem of a layout reported at once with choices that would do."""

from dataclasses import replace

import pytest

from converters.common.errors import ConfigError
from converters.families.llama3 import FLAVORS
from converters.families.registry import get_family
from converters.families.rope import DynamicRope
from converters.families.rules import Rule
from converters.layout.mesh_shape import MeshShape
from trainer.config.load import load_config
from trainer.config.sections import Checkpoint, Config, Debug, Model, Parallelism, Training, Validation
from trainer.data.kinds import streams_of
from trainer.job.job import layout_problems, required_world_size, resolve, resolve_job
from trainer.next_token.problems import sequence_divisor
from trainer.parallel.experts import balance_rate, expert_problems

GQA = FLAVORS["debug_gqa"]  # 4 layers, 8 heads, 4 kv heads, ffn 384, vocab 2048


def problems(parallelism: dict, *, world_size: int, training: dict | None = None, **sections) -> list[str]:
    degrees = Parallelism(**parallelism)
    config = Config(
        model=Model(flavor="debug_gqa"), parallelism=degrees, training=Training(**(training or {})), **sections
    )
    return layout_problems(config, GQA, resolve(degrees, world_size))


def test_the_shard_degree_takes_what_is_left():
    degrees = Parallelism(tensor_parallel_degree=2, pipeline_parallel_degree=2)
    assert resolve(degrees, 8) == MeshShape(pp=2, dp_shard=2, tp=2)
    assert required_world_size(degrees) == 4
    assert required_world_size(replace(degrees, data_parallel_shard_degree=3)) == 12


def test_degrees_that_data_and_parameters_see():
    dims = MeshShape(dp_replicate=2, dp_shard=3, cp=4, tp=5)
    assert (dims.batch, dims.fsdp, dims.world_size) == (6, 12, 120)
    assert sequence_divisor(dims) == 40
    assert sequence_divisor(MeshShape(tp=5)) == 5  # without context parallelism nothing is cut head and tail


def test_a_product_that_is_not_the_world_size():
    with pytest.raises(ConfigError, match=r"needs 6 ranks \(dp_shard 3 × tp 2\), but there are 8") as raised:
        resolve(Parallelism(data_parallel_shard_degree=3, tensor_parallel_degree=2), 8)
    assert raised.value.tries == ("--nproc 6",)
    six = Config(parallelism=Parallelism(data_parallel_shard_degree=3, tensor_parallel_degree=2))
    with pytest.raises(ConfigError) as checked:  # a check and a dry run have no --nproc
        resolve_job(six, 8)
    assert checked.value.tries == ("--world-size 6",)
    assert "data_parallel_shard_degree = 4 would fit" in raised.value.hint
    with pytest.raises(ConfigError) as raised:
        resolve(Parallelism(data_parallel_shard_degree=3, tensor_parallel_degree=2), 7)
    assert raised.value.hint == ""  # no shard degree helps


def test_special_tokens_of_what_is_no_text_are_a_problem():
    tokens, text = {"dataset": "tokens", "special_tokens": True}, {"dataset": "jsonl", "special_tokens": True}
    (problem,) = problems({}, world_size=1, training=tokens)
    assert "`titan data prepare --special-tokens`" in problem
    validation = Validation(enable=True, dataset="c4_validation")
    assert problems({}, world_size=1, training=text) == []
    assert problems({}, world_size=1, training=tokens, validation=validation) == []


def test_a_layout_without_problems():
    assert problems({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}, world_size=8) == []
    assert resolve_job(Config(), 2).dims == MeshShape(dp_shard=2)


# world size, what is changed, words of every problem that must be reported

_PP2 = {"pp": 2}
_UNKNOWN = '[["tok_embeddings","layers.0","layers.0"],["layers.2","layers.9","norm","output"]]'
_SWAPPED = '[["tok_embeddings","layers.1","layers.0"],["layers.2","layers.3","norm","output"]]'
LAYOUTS: list[tuple[int, dict, tuple[str, ...]]] = [
    # the product of the degrees is not the number of ranks
    (6, {"fsdp": 4}, ("needs 4 ranks", "there are 6")),
    (8, {"fsdp": 3}, ("needs 3 ranks", "there are 8", "data_parallel_shard_degree = 8 would fit")),
    (8, {"fsdp": 2, "tp": 2, "pp": 4}, ("needs 16 ranks", "data_parallel_shard_degree = 1 would fit")),
    (3, {"tp": 2, "fsdp": -1}, ("multiply to 2", "2, 4")),
    (10, {"tp": 4, "fsdp": -1}, ("multiply to 4", "8, 12")),
    (1, {"pp": 2, "fsdp": -1}, ("multiply to 2", "2")),
    (12, {"rep": 5, "fsdp": -1}, ("multiply to 5", "10, 15")),
    (4, {"rep": 2, "fsdp": 2, "cp": 2}, ("needs 8 ranks", "dp_replicate 2 × dp_shard 2 × cp 2")),
    # heads, key/value heads, feed-forward, vocabulary over tp
    (3, {"tp": 3, "seq": 63}, ("8 attention heads", "4 key/value heads", "2,048 vocabulary", "possible: 1, 2, 4")),
    (8, {"tp": 8}, ("does not divide 4 key/value heads; possible: 1, 2, 4",)),
    (16, {"tp": 16}, ("8 attention heads, 4 key/value heads; possible: 1, 2, 4",)),
    (5, {"tp": 5, "seq": 65}, ("384 feed-forward columns",)),
    (3, {"tp": 3}, ("attention heads", "seq_len = 64 is not a multiple of 3 (tp); nearest: 63 or 66")),
    (32, {"tp": 32, "flavor": "70B"}, ("does not divide 8 key/value heads; possible: 1, 2, 4, 8",)),
    # sequences over tp and twice cp
    (2, {"tp": 2, "seq": 63}, ("seq_len = 63 is not a multiple of 2 (tp); nearest: 62 or 64",)),
    (2, {"cp": 2, "seq": 66}, ("not a multiple of 4 (tp × 2·cp); nearest: 64 or 68",)),
    (4, {"cp": 2, "tp": 2, "seq": 60}, ("not a multiple of 8 (tp × 2·cp); nearest: 56 or 64",)),
    (8, {"cp": 8, "seq": 8}, ("not a multiple of 16 (tp × 2·cp); nearest: 16",)),
    (3, {"cp": 3}, ("not a multiple of 6 (tp × 2·cp); nearest: 60 or 66",)),
    (2, {"tp": 2, "valid_seq": 31}, ("validation.seq_len = 31 is not a multiple of 2 (tp); nearest: 30 or 32",)),
    (4, {"tp": 2, "cp": 2, "seq": 62, "valid_seq": 20}, ("training.seq_len = 62", "validation.seq_len = 20")),
    # batches
    (2, {"global": 12}, ("global_batch_size = 12 is not a multiple of 16", "nearest: 16")),
    (4, {"global": 40}, ("not a multiple of 32", "nearest: 32 or 64")),
    (4, {"rep": 2, "fsdp": 2, "global": 1}, ("global_batch_size = 1 is not a multiple of 32", "nearest: 32")),
    (2, {"cp": 2, "global": 12}, ("not a multiple of 8", "nearest: 8 or 16")),
    # stages
    (8, {"pp": 8}, ("4 layers cannot be split into 8 pipeline stages", "at most 6 stages")),
    (2, _PP2 | {"per_stage": 2}, ("needs 2 stages, the split has 3",)),
    (2, _PP2 | {"schedule": "Interleaved1F1B", "per_stage": 3}, ("Interleaved1F1B", "the split has 2")),
    (2, _PP2 | {"schedule": "LoopedBFS", "per_stage": 3}, ("needs 4, 6, … stages, the split has 2",)),
    (4, {"pp": 4, "schedule": "Interleaved1F1B"}, ("4 layers cannot be split into 8 pipeline stages",)),
    (2, _PP2 | {"per_stage": 1}, ("the split has 6",)),
    (2, _PP2 | {"modules": _UNKNOWN}, ("unknown: layers.9; missing: layers.1, layers.3; given twice: layers.0",)),
    (2, _PP2 | {"modules": _SWAPPED}, ("not in model order",)),
    # microbatches
    (2, _PP2 | {"micro": 3}, ("= 3 does not divide training.local_batch_size = 8; possible: 1, 2, 4, 8",)),
    (2, _PP2 | {"schedule": "Interleaved1F1B", "batch": 5}, ("Interleaved1F1B", "4 or 6")),
    (2, _PP2 | {"schedule": "Interleaved1F1B", "batch": 7}, ("Interleaved1F1B", "6 or 8")),
    (4, {"pp": 4, "schedule": "ZBVZeroBubble", "per_stage": 1}, ("needs 8 stages", "the split has 6")),
    # several at once, of different kinds
    (16, {"pp": 2, "tp": 8, "seq": 60, "micro": 3}, ("key/value heads", "seq_len = 60", "microbatch_size = 3")),
    (6, {"fsdp": 2, "tp": 2, "seq": 63, "global": 9}, ("needs 4 ranks", "seq_len = 63", "global_batch_size = 9")),
    (7, {"tp": 3, "fsdp": -1, "seq": 64}, ("multiply to 3", "attention heads", "seq_len = 64")),
    (8, {"pp": 8, "batch": 3, "micro": 2, "global": 5}, ("cannot be split into 8", "possible: 1, 3", "multiple of 3")),
]  # fmt: skip

_KEYS = {
    "fsdp": "parallelism.data_parallel_shard_degree",
    "rep": "parallelism.data_parallel_replicate_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "per_stage": "parallelism.pipeline_parallel_layers_per_stage",
    "modules": "parallelism.module_fqns_per_model_part",
    "micro": "parallelism.pipeline_parallel_microbatch_size",
    "batch": "training.local_batch_size",
    "global": "training.global_batch_size",
    "seq": "training.seq_len",
    "valid_seq": "validation.seq_len",
    "flavor": "model.flavor",
}


def words_of(changes: dict) -> list[str]:
    base = {"flavor": "debug_gqa", "seq": 64, "batch": 8, "rep": 1, "tp": 1, "cp": 1, "pp": 1, "fsdp": -1, "micro": 1}
    words = [f"--{_KEYS[name]}={value}" for name, value in (base | changes).items()]
    return [*words, "--validation.enable"] if "valid_seq" in changes else words


@pytest.mark.parametrize(
    ("world_size", "changes", "output"), LAYOUTS, ids=[f"{world} {changes}"[:60] for world, changes, _ in LAYOUTS]
)
def test_a_bad_layout_is_reported_with_all_its_problems_and_what_would_do(tmp_path, world_size, changes, output):
    path = tmp_path / "empty.toml"
    path.write_text("")
    config = load_config(path, words_of(changes))
    with pytest.raises(ConfigError) as caught:
        resolve_job(config, world_size)
    text = "\n".join((caught.value.message, caught.value.hint, *caught.value.tries))
    assert [words for words in output if words not in text] == [], text


def test_the_same_layouts_without_the_fault_are_fine(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    few = _PP2 | {"batch": 1}
    one_batch = {"tp": 2, "global": 8}  # both read the same samples
    layouts = [{"fsdp": 2}, {"tp": 4}, {"cp": 2}, {"tp": 2, "cp": 2}, {"rep": 2, "fsdp": 2}, _PP2, one_batch]
    for changes in (*layouts, few, few | {"schedule": "GPipe"}, {"micro": 3}):
        config = load_config(path, words_of(changes))
        resolve_job(config, args=GQA)


def test_dynamic_rope_is_not_covered_beyond_the_trained_length():
    args = replace(GQA, rope_scaling=DynamicRope(4.0), max_seq_len=64)
    config = Config(training=Training(seq_len=128), validation=Validation(enable=True, seq_len=96))
    output = layout_problems(config, args, MeshShape())
    assert [problem.partition(" tokens")[0] for problem in output] == [
        "training.seq_len = 128 is beyond the model's 64",
        "validation.seq_len = 96 is beyond the model's 64",
    ]
    assert all(problem.endswith("nearest: 64") for problem in output)
    assert layout_problems(config, replace(args, max_seq_len=128), MeshShape()) == []


def test_an_unknown_kind_of_data_is_reported_with_the_known_ones():
    config = Config(training=Training(dataset="wikipedia"))
    (problem,) = layout_problems(config, GQA, MeshShape())
    assert "'wikipedia' is unknown; there is tokens" in problem


def test_streams_that_cannot_be_dealt_are_reported_with_a_number_that_can():
    config = Config(training=Training(dataset="c4", dataset_streams=64))
    (problem,) = layout_problems(config, GQA, MeshShape(dp_shard=96))
    assert "training.dataset_streams = 64 cannot be divided" in problem and "unset, a new run takes 96" in problem


@pytest.mark.parametrize(
    ("degree", "num_streams"), [(1, 64), (3, 66), (64, 64), (65, 65), (96, 96), (100, 100), (128, 128), (512, 512)]
)
def test_a_new_run_takes_as_many_streams_as_its_ranks_divide(degree, num_streams):
    config = Config(training=Training(dataset="c4"))
    assert layout_problems(config, GQA, MeshShape(dp_shard=degree)) == []
    assert streams_of(config.training, degree) == num_streams


MOE = Model(name="qwen3", flavor="debug_moe")


def test_the_bias_of_experts_is_not_exported():
    degrees = {"context_parallel_degree": 2, "pipeline_parallel_degree": 2}
    config = Config(
        model=MOE, parallelism=Parallelism(**degrees), checkpoint=Checkpoint(enable=True, last_save_in_hf=True)
    )
    with pytest.raises(ConfigError) as raised:
        resolve_job(config, 4)
    assert "last_save_in_hf: Hugging Face's models have no place for moe.expert_bias" in raised.value.message
    resolve_job(replace(config, training=Training(expert_balance_rate=0)), 4)


def test_the_bias_of_experts_is_exported_where_hugging_faces_models_have_it():
    """As DeepSeek V3's, whose name for it is here."""
    qwen, config = get_family("qwen3"), Config(model=MOE, checkpoint=Checkpoint(enable=True, last_save_in_hf=True))
    hf = qwen.namings["hf"]
    named = Rule("layers.{n}.moe.expert_bias", "model.layers.{n}.mlp.gate.e_score_correction_bias")
    rules = tuple(named if rule.native == named.native else rule for rule in hf.rules)
    other = replace(qwen, namings=qwen.namings | {"hf": replace(hf, rules=rules)})
    args = qwen.flavors["debug_moe"]
    assert expert_problems(config, other, args, MeshShape()) == []
    (problem,) = expert_problems(config, qwen, args, MeshShape())
    assert problem.startswith("checkpoint.last_save_in_hf")


def test_degrees_that_do_not_divide_experts_are_reported_at_once_with_those_that_do():
    degrees = {"tensor_parallel_degree": 4, "data_parallel_shard_degree": 3}
    wrong = {"expert_parallel_degree": 5, "expert_tensor_parallel_degree": 2}
    with pytest.raises(ConfigError) as raised:
        resolve_job(Config(model=MOE, parallelism=Parallelism(**degrees, **wrong)), 12)
    assert "expert_tensor_parallel_degree = 2 is neither 1 nor tp (4); possible: 1, 4" in raised.value.message
    assert (
        "expert_parallel_degree = 5 does not divide 12 experts and the 12 ranks of dp_shard × cp × tp; possible: 1, 2, "
        "3, 4, 6, 12" in raised.value.message
    )
    dims = resolve_job(Config(model=MOE, parallelism=Parallelism(**degrees, expert_parallel_degree=6)), 12).dims
    assert (dims.ep, dims.expert_tp, dims.efsdp) == (6, 1, 2)
    dims = resolve_job(
        Config(model=MOE, parallelism=Parallelism(**degrees)), 12
    ).dims  # TP slices experts, as torchtitan
    assert (dims.ep, dims.expert_tp, dims.efsdp) == (1, 4, 3)


def test_experts_cut_along_their_columns_need_columns_that_divide():
    with pytest.raises(ConfigError, match=r"leaves 64 ranks for 6 experts, and 96 columns of each do not divide"):
        resolve_job(Config(model=MOE, parallelism=Parallelism(expert_parallel_degree=2)), 128)


def test_a_config_needs_as_many_ranks_as_its_experts():
    def needed(**degrees):
        return resolve_job(Config(model=MOE, parallelism=Parallelism(**degrees))).dims

    assert needed(expert_parallel_degree=4) == MeshShape(dp_shard=4, ep=4)
    of_four = {"tensor_parallel_degree": 2, "expert_parallel_degree": 4}
    assert needed(**of_four) == MeshShape(dp_shard=2, tp=2, ep=4)
    assert needed(**of_four, expert_tensor_parallel_degree=2) == MeshShape(dp_shard=4, tp=2, ep=4, etp=2)


def test_a_dense_model_has_no_experts_to_share():
    with pytest.raises(ConfigError, match=r"expert_parallel_degree = 2 is of experts, and this model has none"):
        resolve_job(Config(parallelism=Parallelism(expert_parallel_degree=2)), 2)


def test_settings_of_experts_are_refused_without_experts():
    config = Config(training=Training(expert_balance_rate=0.01), debug=Debug(moe_force_load_balance=True))
    output = layout_problems(config, GQA, MeshShape())
    assert [problem.partition(",")[0] for problem in output] == [
        "debug.moe_force_load_balance = true",
        "training.expert_balance_rate = 0.01",
    ]
    assert resolve_job(replace(config, model=MOE)).dims == MeshShape()


def test_a_forced_load_moves_no_bias():
    config = Config(training=Training(expert_balance_rate=0.01))
    assert balance_rate(config, 0.5) == 0.01 and balance_rate(Config(), 0.5) == 0.5
    assert balance_rate(replace(config, debug=Debug(moe_force_load_balance=True)), 0.5) == 0
