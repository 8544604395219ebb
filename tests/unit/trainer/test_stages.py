"""Pipeline stages: who holds which modules, and models with the rest taken out."""

import pytest
import torch

from converters.errors import ConfigError
from converters.families.llama3 import FLAVORS
from trainer.config.sections import Parallelism
from trainer.models.llama3.model import Transformer
from trainer.parallel.pipeline import keep_modules
from trainer.stages import split_model


def test_one_stage_per_rank_or_two_for_looped_schedules():
    split = split_model(Parallelism(pipeline_parallel_schedule="1F1B"), 8, 2)
    assert split.modules == (
        ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"),
        ("layers.4", "layers.5", "layers.6", "layers.7", "norm", "output"),
    )
    split = split_model(Parallelism(pipeline_parallel_schedule="Interleaved1F1B"), 8, 2)
    assert split.num_stages == 4
    assert [split.stages_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert not split.ends_meet


def test_a_v_goes_there_and_back_again():
    split = split_model(Parallelism(pipeline_parallel_schedule="ZBVZeroBubble"), 8, 3)
    assert split.ranks == (0, 1, 2, 2, 1, 0) and split.ends_meet
    assert [split.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_layers_per_stage_counts_embedding_and_output_as_layers():
    parallelism = Parallelism(pipeline_parallel_schedule="LoopedBFS", pipeline_parallel_layers_per_stage=4)
    sizes = [len(modules) for modules in split_model(parallelism, 126, 16).modules]  # Llama 3 405B
    assert sizes == [4] * 31 + [5]  # the first has 3 layers and the embedding, the last 3 and norm and output


def test_without_a_pipeline_everything_is_one_stage():
    assert split_model(Parallelism(), 2, 1).modules == (("tok_embeddings", "layers.0", "layers.1", "norm", "output"),)


def test_stages_written_out_are_taken_as_they_are():
    explicit = (("tok_embeddings",), ("layers.0", "layers.1", "norm", "output"))
    assert split_model(Parallelism(module_fqns_per_model_part=explicit), 2, 2).modules == explicit


def test_more_stages_than_layers():
    with pytest.raises(ConfigError, match="cannot be split"):
        split_model(Parallelism(), 2, 8)


def test_a_stage_keeps_its_modules_under_their_names():
    with torch.device("meta"):
        stage = keep_modules(Transformer(FLAVORS["debug_tied"]), ("layers.2", "layers.3", "norm", "output"))
    names = [name for name, _ in stage.named_parameters()]
    assert stage.tok_embeddings is None
    assert list(stage.layers) == ["2", "3"]
    assert names[0] == "layers.2.attention.wq.weight" and names[-2:] == ["norm.weight", "output.weight"]
