"""Any layout trains as one rank does: the same first weights, losses, gradients, validation and last weights."""

from pathlib import Path

import pytest
import torch

from tests.dist import runs
from tests.dist.layouts import (
    AOT_EAGER,
    CASES,
    FSDP_TP_PP,
    FULL,
    GQA,
    MAIN,
    MICROBATCH,
    ONE_RANK,
    QWEN_GQA,
    SLOW_CASES,
    TIED,
    TP,
)
from tests.dist.training import Layout, compare, make_reference, train
from trainer.config.load import load_config
from trainer.config.sections import ActivationCheckpoint, Config
from trainer.job.job import resolve_job
from trainer.parallel.compile import _confuses_saved_tensors
from trainer.seed import seed

CPU = torch.device("cpu")
STEPS = 30  # in the slow set
FEW_STEPS = 2


def names(case: tuple[Layout, str]) -> str:
    layout, flavor = case
    return f"{layout.name}-{flavor}"


@pytest.fixture(scope="module")
def one_rank(pools, tmp_path_factory):
    """(flavor, steps) → the output of one rank, and the file of its gradients and weights."""
    folder, made = tmp_path_factory.mktemp("one-rank"), {}

    def run(flavor: str, steps: int) -> tuple[dict, Path]:
        if (flavor, steps) not in made:
            path = folder / f"{flavor.replace('/', '-')}-{steps}.pt"
            made[flavor, steps] = pools[1].run(make_reference, ONE_RANK, flavor, steps, path)[0], path
        return made[flavor, steps]

    return run


@pytest.fixture(scope="module")
def compared(pools, one_rank):
    """(layout, flavor, steps) → the output of each rank; trained once."""
    output = {}

    def run(layout: Layout, flavor: str, steps: int) -> list[dict]:
        key = layout.name, flavor, steps
        if key not in output:
            _, path = one_rank(flavor, steps)
            output[key] = pools[layout.world_size].run(compare, layout, flavor, steps, path)
        return output[key]

    return run


def assert_equal_to_one_rank(one: dict, ranks: list[dict], fqns: set[str]) -> None:
    first = ranks[0]
    for output in ranks:
        assert output["not as seeded"] == []
        assert (output["losses"], output["norms"]) == (first["losses"], first["norms"])
    assert first["validated"] == pytest.approx(one["validated"], abs=5e-6, rel=0)
    assert first["losses"] == pytest.approx(one["losses"], abs=5e-6, rel=0)
    assert first["norms"] == pytest.approx(one["norms"], rel=1e-4)
    for what, bound in (("gradients", 1e-5), ("weights", 1e-4)):
        assert set().union(*(output[what] for output in ranks)) == fqns
        too_far = {fqn: error for output in ranks for fqn, error in output[what].items() if not error <= bound}
        assert too_far == {}, what


@pytest.mark.parametrize("case", CASES, ids=names)
def test_a_layout_equals_one_rank(one_rank, compared, case):
    layout, flavor = case
    one, _ = one_rank(flavor, FEW_STEPS)
    assert_equal_to_one_rank(one, compared(layout, flavor, FEW_STEPS), one["fqns"])


@pytest.mark.slow  # in the suite: the runs of test_objective.py and of docs/extend.md
@pytest.mark.parametrize("flavor", [GQA, TIED])
def test_the_loss_falls(one_rank, flavor):
    losses = one_rank(flavor, STEPS)[0]["losses"]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + SLOW_CASES, ids=names)
def test_a_layout_equals_one_rank_over_many_steps(one_rank, compared, case):
    layout, flavor = case
    one, _ = one_rank(flavor, STEPS)
    assert_equal_to_one_rank(one, compared(layout, flavor, STEPS), one["fqns"])


@pytest.mark.slow
@pytest.mark.skipif(_confuses_saved_tensors(ActivationCheckpoint(**FULL), CPU), reason="refused with this torch")
@pytest.mark.parametrize("flavor", [GQA, QWEN_GQA])
def test_compiled_layers_that_are_recomputed_whole_equal_one_rank(one_rank, compared, flavor):
    again = {"compile": AOT_EAGER, "activation_checkpoint": FULL}
    layout = Layout("compiled, full recomputation, tp 2", 2, {TP: 2}, sections=again)
    one, _ = one_rank(flavor, FEW_STEPS)
    assert_equal_to_one_rank(one, compared(layout, flavor, FEW_STEPS), one["fqns"])


BY_NAME = {layout.name: layout for layout, _ in CASES}
RERUN = [("tp 2", TIED), ("ZBVZeroBubble", TIED)]


@pytest.mark.parametrize(("name", "flavor"), RERUN)
def test_a_rerun_is_bit_equal(pools, compared, name, flavor):
    layout = BY_NAME[name]
    again = pools[layout.world_size].run(train, layout, flavor, FEW_STEPS)
    for output, first in zip(again, compared(layout, flavor, FEW_STEPS), strict=True):
        assert output == {what: first[what] for what in ("losses", "norms")}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + SLOW_CASES, ids=names)
def test_a_rerun_is_bit_equal_in_any_layout(pools, case):
    layout, flavor = case
    first, again = (pools[layout.world_size].run(train, layout, flavor, 5) for _ in range(2))
    assert first == again


SEEDED = {layout.name: layout for layout in (ONE_RANK, *MAIN, FSDP_TP_PP, BY_NAME["ZBVZeroBubble"])}


@pytest.fixture(scope="module")
def from_seed(pools, tmp_path_factory):
    """(layout, flavor) → losses of a run on a token index that begins from the one seed checkpoint of the flavor."""
    folder = tmp_path_factory.mktemp("from-seed")
    data, output = runs.make_data(folder), {}

    def config(name: str, flavor: str, **sections) -> Config:
        degrees = SEEDED[name].parallelism | {MICROBATCH: 1}
        dump = folder / flavor / name.replace(" ", "-")
        return runs.make_config(data, dump, flavor=flavor, steps=3, parallelism=degrees, **sections)

    def run(name: str, flavor: str) -> dict[int, float]:
        checkpoint = folder / flavor / "seed"
        if not checkpoint.exists():
            seed(resolve_job(config("fsdp 2 tp 2 pp 2", flavor, debug={"seed": 5})), checkpoint)
        if (name, flavor) not in output:
            # the run's own seed, 0, gives other weights: they show if nothing was loaded
            settings = config(name, flavor, checkpoint={"initial_load_path": str(checkpoint), "enable": False})
            assert not any(pools[SEEDED[name].world_size].run(runs.run, settings))
            output[name, flavor] = runs.read_losses(Path(settings.job.dump_folder))
        return output[name, flavor]

    return run


@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        ("ZBVZeroBubble", TIED),
        pytest.param("cp 2", GQA, marks=pytest.mark.slow),
        pytest.param("fsdp 2 tp 2 pp 2", TIED, marks=pytest.mark.slow),
        pytest.param("fsdp 2", GQA, marks=pytest.mark.slow),
        pytest.param("tp 2", GQA, marks=pytest.mark.slow),
        pytest.param("pp 2", TIED, marks=pytest.mark.slow),
    ],
)
def test_the_same_seed_checkpoint_gives_the_same_losses(from_seed, name, flavor):
    one, many = from_seed("one rank", flavor), from_seed(name, flavor)
    assert one.keys() == many.keys() == {1, 2, 3}
    assert list(many.values()) == pytest.approx(list(one.values()), abs=5e-6, rel=0)


@pytest.mark.slow
def test_the_preset_debug_has_one_ranks_losses_in_its_own_layout(pools, tmp_path):
    data = runs.make_data(tmp_path)
    cut = ["--training.seq_len=32", "--training.steps=3", "--metrics.log_freq=1", f"--training.dataset_path={data}"]
    cut += ["--validation.no_enable", "--checkpoint.no_enable", "--metrics.no_enable_tensorboard"]
    axes = ("data_parallel_shard", "tensor_parallel", "pipeline_parallel")
    losses = {}
    for ranks, words in {8: [], 1: [f"--parallelism.{axis}_degree=1" for axis in axes]}.items():
        dump = tmp_path / str(ranks)
        config = load_config("debug", [*cut, *words, f"--job.dump_folder={dump}"])
        assert pools[ranks].run(runs.run, config) == [""] * ranks
        losses[ranks] = runs.read_losses(dump)
    assert losses[8].keys() == {1, 2, 3} and losses[8] == pytest.approx(losses[1], rel=0, abs=5e-6)
