"""Which losses a config may name, and the errors for others."""

from dataclasses import replace

import pytest

from converters.common.errors import ConfigError
from converters.common.extensions import ExtensionError
from converters.families.llama3 import FLAVORS
from converters.layout.mesh_shape import MeshShape
from trainer.config.sections import Compile, Config, Parallelism, Training
from trainer.job.job import layout_problems, resolve_job
from trainer.loss import registry as loss_registry
from trainer.loss.registry import num_loss_chunks, register_loss
from trainer.next_token.numbers import chunk_tokens, loss_chunks

ARGS = FLAVORS["debug_gqa"]


@pytest.fixture(autouse=True)
def no_others(monkeypatch):
    monkeypatch.setattr(loss_registry, "_REGISTERED", {})


def a_loss(logits_BLV, targets_BL, group=None):
    raise AssertionError("only its name is asked for")


def config(loss: str, compile_: Compile | None = None, **parallelism) -> Config:
    return Config(training=Training(loss=loss), parallelism=Parallelism(**parallelism), compile=compile_ or Compile())


def loss_problems(config: Config, dims: MeshShape) -> list[str]:
    """Problems of the layout that are the loss's; the other features' are not of interest here."""
    return [problem for problem in layout_problems(config, ARGS, dims) if "training.loss" in problem]


def test_an_unknown_loss_is_an_error_that_names_those_that_exist():
    register_loss("mine", a_loss)
    with pytest.raises(ConfigError, match="training.loss = 'plane' does not exist; there are chunked, plain, mine"):
        resolve_job(config("plane"), args=ARGS)


@pytest.mark.parametrize("loss", ["chunked", "plain", "mine"])
@pytest.mark.parametrize("dims", [MeshShape(), MeshShape(pp=2), MeshShape(cp=2, dp_shard=2)])
def test_a_known_loss_goes_everywhere_but_next_to_loss_parallel(loss, dims):
    register_loss("mine", a_loss)
    assert loss_problems(config(loss), dims) == []


def test_a_loss_of_whole_logits_is_refused_next_to_loss_parallel():
    register_loss("mine", a_loss)
    register_loss("sharded", a_loss, takes_columns=True)
    tp = MeshShape(tp=2)
    (output,) = loss_problems(config("mine"), tp)
    assert "set parallelism.disable_loss_parallel, or register it with takes_columns" in output
    assert loss_problems(config("mine", disable_loss_parallel=True), tp) == []
    for loss in ("sharded", "chunked", "plain"):
        assert loss_problems(config(loss), tp) == []


@pytest.mark.parametrize("name", ["chunked", "plain"])
def test_losses_of_titans_own_cannot_be_replaced(name):
    with pytest.raises(ExtensionError, match=f"loss {name!r} is built in; choose another name"):
        register_loss(name, a_loss)


def test_a_compiled_loss_under_a_split_backward_must_be_the_chunked_one():
    compiled, split = Compile(enable=True, components=("loss",)), {"pipeline_parallel_schedule": "ZBVZeroBubble"}
    (output,) = loss_problems(config("plain", compiled, **split), MeshShape(pp=2))
    assert 'set training.loss = "chunked"' in output
    assert loss_problems(config("chunked", compiled, **split), MeshShape(pp=2)) == []
    assert loss_problems(config("plain", replace(compiled, components=()), **split), MeshShape(pp=2)) == []
    assert loss_problems(config("plain", compiled), MeshShape(pp=2)) == []


@pytest.mark.parametrize(
    ("num_tokens", "num_columns", "is_compiled", "expected"),
    [
        (16_384, 128_256, True, 2),
        (16_384, 128_256, False, 8),
        (8_192, 128_256, True, 1),
        (8_192, 128_256, False, 4),
        (16_384, 128_256 // 8, False, 1),  # vocabulary shards
        (65_536, 151_936, True, 16),  # 10 would be enough, but does not divide the tokens
        (24_576, 128_256, True, 3),
        (40_960, 128_256, True, 5),
        (50, 2048, False, 1),
        (7, 2**31, True, 7),
    ],
)
def test_chunks_are_as_few_as_their_size_allows(num_tokens, num_columns, is_compiled, expected):
    assert num_loss_chunks(0, num_tokens=num_tokens, num_columns=num_columns, is_compiled=is_compiled) == expected
    assert num_loss_chunks(8, num_tokens=num_tokens, num_columns=num_columns, is_compiled=is_compiled) == 8


def test_a_jobs_chunks_follow_its_layout():
    args = FLAVORS["8B"]

    def job(world_size, *, compile=True, **keys):
        training = {"seq_len": 8192, "local_batch_size": 2} | keys.pop("training", {})
        whole = Config(training=Training(**training), parallelism=Parallelism(**keys), compile=Compile(enable=compile))
        return resolve_job(whole, world_size, args=args)

    one = job(1)
    assert (loss_chunks(one), chunk_tokens(one)) == (2, 8192)
    assert loss_chunks(job(1, compile=False)) == 8
    assert loss_chunks(job(2, tensor_parallel_degree=2)) == 1
    assert loss_chunks(job(2, tensor_parallel_degree=2, disable_loss_parallel=True)) == 2
    assert loss_chunks(job(2, context_parallel_degree=2)) == 1
    assert chunk_tokens(job(2, pipeline_parallel_degree=2)) == 8192  # of a microbatch of one sample
    assert chunk_tokens(job(1, training={"loss_chunks": 8})) == 2048
