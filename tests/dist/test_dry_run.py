"""What a dry run says of a rank is what real ranks do: the same collectives, call by call and byte by byte."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from converters.common.errors import UnsupportedError
from converters.families.registry import get_family
from trainer.build import build
from trainer.config.load import load_config
from trainer.data.batch import TokenBatch
from trainer.dry_run import CollectiveCount, _by_axis, _group_names, dry_run
from trainer.job.job import resolve_job
from trainer.optim.optimizer import build_optimizer
from trainer.parallel import expert_exchange
from trainer.ranks.mesh import make_meshes
from trainer.step import TrainStep

WORDS = ["--training.seq_len=32", "--training.local_batch_size=4", "--training.global_batch_size=-1"]
WORDS.append("--validation.no_enable")

MICROBATCHES = ["--parallelism.pipeline_parallel_microbatch_size=2", "--activation_checkpoint.mode=none"]


def config_of(words):
    config = load_config("debug", [*WORDS, *words])
    return config, get_family(config.model.name).flavors[config.model.flavor]


def degrees(**wanted):
    names = {"fsdp": "data_parallel_shard", "rep": "data_parallel_replicate", "tp": "tensor_parallel"}
    names |= {"cp": "context_parallel", "pp": "pipeline_parallel"}
    return [f"--parallelism.{name}_degree={wanted.get(axis, 1)}" for axis, name in names.items()]


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = CollectiveCount()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        self.count.see(func, args)
        return func(*args, **(kwargs or {}))


def really(words):
    """One rank of four: the traffic of a second step, and the elements it holds."""
    config, args = config_of(words)
    job = resolve_job(config, dist.get_world_size())
    dims, meshes = job.dims, make_meshes(job.dims, "cpu")
    model = build(job, meshes, torch.device("cpu"))
    model.initialize(0)
    training = config.training
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    step = TrainStep(model, meshes, max_norm=1.0, local_batch_size=training.local_batch_size)
    samples = training.global_batch_size // dims.batch if training.global_batch_size > 0 else training.local_batch_size
    tokens = torch.randint(args.vocab_size, (samples, training.seq_len))
    batch = TokenBatch(tokens=tokens, targets=tokens)
    step.run(batch, optimizer)
    optimizer.zero_grad()
    with Counting() as counting, bytes_given_to_torch() as exchanged:
        step.run(batch, optimizer)
    found = plain(_by_axis(counting.count, _group_names(meshes)))
    if dims.ep > 1:
        assert found["ep", "all-to-all"] == (len(exchanged), sum(exchanged))
    return found


@contextmanager
def bytes_given_to_torch():
    """The bytes of the input of each all-to-all of experts."""
    found, exchange = [], expert_exchange.dist.all_to_all_single

    def counted(output, rows, *args, **keys):
        found.append(rows.nbytes)
        return exchange(output, rows, *args, **keys)

    with patch.object(expert_exchange.dist, "all_to_all_single", counted):
        yield found


def plain(traffic):
    return {key: (found.calls, found.bytes) for key, found in traffic.items()}


# A dry run receives as many rows as routing in turn sends
BALANCED_EXPERTS = ["--model.name=qwen3", "--model.flavor=debug_moe", "--debug.moe_force_load_balance"]
SLICED = [
    "--parallelism.expert_parallel_degree=2",
    "--parallelism.expert_tensor_parallel_degree=2",
    "--debug.moe_force_load_balance",
]
OF_TWELVE = ["--training.seq_len=96"]  # so that rows divide by twelve experts
SLOW = [
    [*degrees(rep=4, fsdp=1), "--training.global_batch_size=48"],
    [*degrees(fsdp=2, pp=2), "--model.name=qwen3", "--model.flavor=debug_moe_mixed"],
    [*degrees(fsdp=2, tp=2), "--training.global_batch_size=24", "--training.mixed_precision_param=bfloat16"],
    [*degrees(fsdp=2, tp=2), *SLICED, "--activation_checkpoint.mode=full", *BALANCED_EXPERTS],
    *(
        [*degrees(fsdp=2, tp=2), *SLICED, *OF_TWELVE, f"--model.name={family}", f"--model.flavor={flavor}"]
        for family, flavor in (("gpt_oss", "debug_window"), ("llama4", "debug_scout"))
    ),
    [*degrees(cp=2, tp=2), "--model.flavor=debug_tied"],
    degrees(fsdp=2, tp=2),
    [*degrees(fsdp=2, pp=2), "--activation_checkpoint.mode=full"],
    [*degrees(pp=2, tp=2), "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"],
]


@pytest.mark.parametrize(
    "words",
    [
        [*degrees(rep=2, pp=2), "--model.flavor=debug_tied"],
        [*degrees(fsdp=2, tp=2), "--parallelism.expert_parallel_degree=2", *BALANCED_EXPERTS],
        *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW),
    ],
    ids=lambda words: " ".join(w.split(".")[-1] for w in words if not w.endswith("=1")),
)
def test_collectives_are_those_of_real_ranks(pools, words):
    output = pools[4].run(really, words)
    config, args = config_of(words)
    for rank in (0, 3) if config.parallelism.pipeline_parallel_degree > 1 else (3,):
        found = dry_run(resolve_job(config, 4), rank=rank)
        assert plain(found.collectives) == output[rank], rank
        assert sum(calls for calls, _ in output[rank].values()) > 3


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        (2, degrees(tp=2)),
        *(
            pytest.param(4, degrees(**axes), marks=pytest.mark.slow)
            for axes in ({"fsdp": 2, "tp": 2}, {"fsdp": 2, "pp": 2}, {"tp": 2, "cp": 2})
        ),
    ],
)
def test_parameters_of_all_ranks_are_the_models(num_ranks, words):
    config, args = config_of(words)
    job = resolve_job(config, num_ranks)
    dims, ranks = job.dims, [dry_run(job, rank=rank) for rank in range(num_ranks)]
    norms = sum(p.shape[0] for p in get_family("llama3").parameters(args) if p.tp_dim is None)
    copies = (dims.tp - 1) * norms  # norms are on every tensor-parallel rank
    assert sum(found.rank_parameters for found in ranks) == ranks[0].model_parameters + copies
    for found in ranks:
        assert found.parameter_bytes == found.gradient_bytes == 4 * found.rank_parameters
        assert found.optimizer_bytes == 8 * found.rank_parameters + 4 * num_tensors(found, args)


def num_tensors(found, args):
    """One step counter for each."""
    modules = {module for stage in found.stages.values() for module in stage}
    return sum(any(p.fqn.startswith(f"{module}.") for module in modules) for p in get_family("llama3").parameters(args))


@pytest.mark.parametrize(
    ("layout", "policy", "calls"),
    [
        # embedding, four layers, and norm with output, which backward needs at once
        pytest.param(degrees(fsdp=4), "never", 6, marks=pytest.mark.slow),
        (degrees(fsdp=4), "default", 6 + 5),
        pytest.param(degrees(fsdp=4), "always", 6 + 6, marks=pytest.mark.slow),
        # embedding and two layers; freed, two forwards gather them and the first of the backwards
        pytest.param(degrees(fsdp=2, pp=2), "never", 3, marks=pytest.mark.slow),
        (degrees(fsdp=2, pp=2), "default", 3),
        pytest.param(degrees(fsdp=2, pp=2), "always", 3 * 3, marks=pytest.mark.slow),
    ],
)
def test_parameters_are_gathered_again_where_the_policy_frees_them(layout, policy, calls):
    config, args = config_of([*layout, f"--parallelism.fsdp_reshard_after_forward={policy}", *MICROBATCHES])
    found = dry_run(resolve_job(config, 4), rank=0)
    (gathered,) = [traffic.calls for (axis, kind), traffic in found.collectives.items() if kind == "all-gather"]
    assert gathered == calls


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        # each of four layers: rows there and back, in forward and in backward; and once the counts
        pytest.param("none", 4 * (4 + 1), marks=pytest.mark.slow),
        ("selective", 4 * (4 + 1)),
        ("full", 4 * (6 + 2)),
    ],
)
def test_experts_exchange_rows_again_only_where_whole_layers_are_recomputed(mode, calls):
    modes = [f"--activation_checkpoint.mode={mode}", "--activation_checkpoint.selective_ac_option=op"]
    config, _ = config_of([*degrees(fsdp=2), "--parallelism.expert_parallel_degree=2", *BALANCED_EXPERTS, *modes])
    found = dry_run(resolve_job(config, 2), rank=0)
    assert found.collectives["ep", "all-to-all"].calls == calls


def test_a_split_backward_is_refused_where_torch_cannot_trace_it(monkeypatch):
    schedule = "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"
    config, _ = config_of([*degrees(pp=2), schedule, *MICROBATCHES])
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    with pytest.raises(UnsupportedError, match="schedule ZBVZeroBubble needs torch 2.13"):
        dry_run(resolve_job(config, 2), rank=0)
