"""Pipeline stages: who holds which modules, and models with the rest taken out."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.torch_version import TorchVersion

from converters.common.errors import ConfigError
from converters.families.llama3 import FLAVORS
from converters.layout.mesh_shape import MeshShape
from converters.layout.stages import ranks_of_stages
from trainer.config.sections import ActivationCheckpoint, Config, Parallelism, Training
from trainer.job.job import layout_problems
from trainer.models.decoder import Transformer
from trainer.parallel.pipeline import keep_modules
from trainer.parallel.stages import (
    LOOPED_SCHEDULES,
    V_SCHEDULES,
    schedule_machine_problems,
    schedule_of,
    split_model,
    stage_problems,
)


def units(num_layers: int) -> list[str]:
    return ["tok_embeddings", *(f"layers.{number}" for number in range(num_layers)), "norm", "output"]


def test_one_stage_per_rank_or_two_for_looped_schedules():
    split = split_model(Parallelism(pipeline_parallel_schedule="1F1B"), units(8), 2)
    assert split.modules == (
        ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"),
        ("layers.4", "layers.5", "layers.6", "layers.7", "norm", "output"),
    )
    split = split_model(Parallelism(pipeline_parallel_schedule="Interleaved1F1B"), units(8), 2)
    assert split.num_stages == 4
    assert [split.stages_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert not split.first_and_last_on_one_rank


def test_the_61_layers_of_deepseek_v3_over_two_stages_of_eight_ranks():
    """As torchtitan v0.2.2's generate_llm_fqn_per_model_part, which counts the two ends as a layer each."""
    split = split_model(Parallelism(pipeline_parallel_schedule="Interleaved1F1B"), units(61), 8)
    num_layers = [sum(name.startswith("layers.") for name in modules) for modules in split.modules]
    assert num_layers == [3, *[4] * 14, 2]
    assert split.modules[7] == ("layers.27", "layers.28", "layers.29", "layers.30")


def test_a_v_goes_there_and_back_again():
    split = split_model(Parallelism(pipeline_parallel_schedule="ZBVZeroBubble"), units(8), 3)
    assert split.ranks == (0, 1, 2, 2, 1, 0) and split.first_and_last_on_one_rank
    assert [split.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_layers_per_stage_counts_embedding_and_output_as_layers():
    parallelism = Parallelism(pipeline_parallel_schedule="LoopedBFS", pipeline_parallel_layers_per_stage=4)
    sizes = [len(modules) for modules in split_model(parallelism, units(126), 16).modules]  # Llama 3 405B
    assert sizes == [4] * 31 + [5]  # the first has 3 layers and the embedding, the last 3 and norm and output


@pytest.mark.parametrize(
    ("first", "last", "sizes"), [(1, 1, [4, 4]), (0, 0, [4, 4]), (3, 0, [3, 5]), (0, 3, [6, 2]), (5, 0, [2, 6])]
)
def test_the_first_and_the_last_stage_get_as_many_layers_less_as_asked(first, last, sizes):
    parallelism = Parallelism(
        pipeline_parallel_first_stage_less_layers=first, pipeline_parallel_last_stage_less_layers=last
    )
    stages = split_model(parallelism, units(8), 2).modules
    assert [sum(name.startswith("layers.") for name in stage) for stage in stages] == sizes


def test_without_a_pipeline_everything_is_one_stage():
    assert split_model(Parallelism(), units(2), 1).modules == (
        ("tok_embeddings", "layers.0", "layers.1", "norm", "output"),
    )


def test_stages_written_out_are_taken_as_they_are():
    explicit = (("tok_embeddings",), ("layers.0", "layers.1", "norm", "output"))
    assert split_model(Parallelism(module_fqns_per_model_part=explicit), units(2), 2).modules == explicit


def test_more_stages_than_layers():
    with pytest.raises(ConfigError, match="cannot be split"):
        split_model(Parallelism(), units(2), 8)


def test_a_stage_keeps_its_modules_under_their_names():
    with torch.device("meta"):
        stage = keep_modules(Transformer(FLAVORS["debug_tied"]), ("layers.2", "layers.3", "norm", "output"))
    names = [name for name, _ in stage.named_parameters()]
    assert stage.tok_embeddings is None
    assert list(stage.layers) == ["2", "3"]
    assert names[0] == "layers.2.attention.wq.weight" and names[-2:] == ["norm.weight", "output.weight"]
    with torch.device("meta"):
        first = keep_modules(Transformer(FLAVORS["debug_tied"]), ("tok_embeddings", "layers.0"))
    assert first.tok_embeddings is not None and (first.norm, first.output) == (None, None)


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")


def torch_takes(schedule: str, pp: int, num_stages: int, num_microbatches: int) -> bool:
    """Whether torch's class makes its plan for rank 0; it checks there that no rank waits for ever."""
    schedule_class = get_schedule_class(schedule)
    ranks = ranks_of_stages(num_stages, pp, v_shaped=schedule in V_SCHEDULES)
    stages = [
        SimpleNamespace(stage_index=stage, num_stages=num_stages, group_size=pp, group_rank=0, submod=None)
        for stage, rank in enumerate(ranks)
        if rank == 0
    ]
    try:
        schedule_class(
            stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0],
            n_microbatches=num_microbatches,
            loss_fn=lambda *args: None,
        )
    except (ValueError, RuntimeError, AssertionError):
        return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_let_through_is_what_torch_takes(schedule):
    """With the stages that a schedule should have, exactly; with other numbers of stages we let nothing through."""
    for pp, per_rank, num_microbatches in itertools.product((2, 3, 4), (1, 2, 3), range(1, 13)):
        parallelism = Parallelism(
            pipeline_parallel_schedule=schedule, pipeline_parallel_layers_per_stage=1, **dict.fromkeys(ENDS, 0)
        )
        problems = stage_problems(parallelism, Training(local_batch_size=num_microbatches), units(pp * per_rank), pp)
        if per_rank in ((2, 3) if schedule in LOOPED_SCHEDULES else (2,) if schedule in V_SCHEDULES else (1,)):
            runs = schedule_of(parallelism, num_microbatches=num_microbatches, pp=pp)
            assert torch_takes(runs, pp, pp * per_rank, num_microbatches) == (not problems), problems
            assert runs == schedule or not torch_takes(schedule, pp, pp * per_rank, num_microbatches)
        else:
            assert "stages, the split has" in problems[0]


ENDS = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")


@pytest.mark.parametrize(
    ("keys", "batch", "expected"),
    [
        (
            {"pipeline_parallel_schedule": "ZBVZeroBubble", "pipeline_parallel_layers_per_stage": 3},
            8,
            ["needs 4 stages, the split has 6; pipeline_parallel_layers_per_stage = 4 would work"],
        ),
        (
            {"pipeline_parallel_schedule": "LoopedBFS", "pipeline_parallel_layers_per_stage": 6},
            8,
            ["needs 4, 6, … stages, the split has 3; pipeline_parallel_layers_per_stage = 5 would work"],
        ),
        (
            {"pipeline_parallel_schedule": "InterleavedZeroBubble", "fsdp_reshard_after_forward": "always"},
            9,
            ["9 microbatches over 2 ranks", "training.local_batch_size = 8 or 10", "those gradients would be lost"],
        ),
        (
            {"pipeline_parallel_schedule": "ZBVZeroBubble", "module_fqns_per_model_part": (("output",),)},
            8,
            ["missing: tok_embeddings", "needs 4 stages, the split has 1"],
        ),
        ({"pipeline_parallel_microbatch_size": 3}, 8, ["does not divide", "possible: 1, 2, 4, 8"]),
    ],
)
def test_everything_that_does_not_fit_is_reported_with_the_nearest_that_does(keys, batch, expected):
    problems = "\n".join(stage_problems(Parallelism(**keys), Training(local_batch_size=batch), units(14), 2))
    for text in expected:
        assert text in problems


@pytest.mark.parametrize(
    ("version", "schedule", "degree", "is_refused"),
    [
        ("2.11.0+cu130", "ZBVZeroBubble", 2, True),
        ("2.12.1", "InterleavedZeroBubble", 2, True),
        ("2.12.1", "InterleavedZeroBubble", 1, False),
        ("2.11.0", "Interleaved1F1B", 2, False),
        ("2.13.0+cpu", "ZBVZeroBubble", 2, False),
    ],
)
def test_a_torch_that_splits_backward_wrongly_is_refused(monkeypatch, version, schedule, degree, is_refused):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    parallelism = Parallelism(pipeline_parallel_degree=degree, pipeline_parallel_schedule=schedule)
    found = schedule_machine_problems(parallelism)
    assert bool(found) == is_refused and all("needs torch 2.13" in problem for problem in found)


def test_recomputation_is_refused_where_backward_is_split():
    parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBVZeroBubble")
    dims, args = MeshShape(pp=2), FLAVORS["debug_gqa"]
    for mode, is_refused in {"none": False, "full": True, "selective": True}.items():
        config = Config(parallelism=parallelism, activation_checkpoint=ActivationCheckpoint(mode=mode))
        problems = [p for p in layout_problems(config, args, dims) if "runs backward once for inputs" in p]
        assert len(problems) == is_refused
