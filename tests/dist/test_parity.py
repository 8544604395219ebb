"""Any layout trains as one rank does: from the same seed on the same data, the same losses."""

from pathlib import Path

import pytest

from tests.dist import runs
from tests.dist.training import Layout, train
from trainer.config.sections import Config
from trainer.seed import seed

STEPS = 20
FLAVORS = ("debug_gqa", "debug_tied")
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one rank"),
        Layout("fsdp 2", 2),
        Layout("tp 2", 2, {"tensor_parallel_degree": 2}),
        Layout("cp 2", 2, {"context_parallel_degree": 2}),
        Layout("pp 2", 2, {"pipeline_parallel_degree": 2}),
        Layout("fsdp 2 cp 2", 4, {"context_parallel_degree": 2}),
        Layout("fsdp 2 tp 2 pp 2", 8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    )
}


@pytest.fixture(scope="module")
def trained(pools):
    """(layout, flavor) → what 20 steps of it told on each rank; trained once."""
    told = {}

    def run(name: str, flavor: str) -> list[dict]:
        if (name, flavor) not in told:
            layout = LAYOUTS[name]
            told[name, flavor] = pools[layout.world_size].run(train, layout, flavor, STEPS)
        return told[name, flavor]

    return run


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one rank"])
def test_losses_equal_one_rank(trained, name, flavor):
    (one,), ranks = trained("one rank", flavor), trained(name, flavor)
    assert all(told == ranks[0] for told in ranks)
    assert ranks[0]["losses"] == pytest.approx(one["losses"], abs=5e-6, rel=0)
    assert ranks[0]["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert one["losses"][-1] < one["losses"][0] - 0.2  # something was learnt


def _assert_a_rerun_is_bit_equal(pools, trained, name, flavor):
    again = pools[LAYOUTS[name].world_size].run(train, LAYOUTS[name], flavor, STEPS)
    assert again == trained(name, flavor)


@pytest.mark.parametrize(("name", "flavor"), [("fsdp 2 tp 2 pp 2", "debug_tied"), ("fsdp 2 cp 2", "debug_gqa")])
def test_a_rerun_is_bit_equal(pools, trained, name, flavor):
    _assert_a_rerun_is_bit_equal(pools, trained, name, flavor)


@pytest.mark.slow
@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rerun_is_bit_equal_in_any_layout(pools, trained, name, flavor):
    _assert_a_rerun_is_bit_equal(pools, trained, name, flavor)


@pytest.fixture(scope="module")
def from_seed(pools, tmp_path_factory):
    """(layout, flavor) → losses of a run on a token index that begins from the one seed checkpoint of the flavor."""
    folder = tmp_path_factory.mktemp("from-seed")
    data, told = runs.make_data(folder), {}

    def config(name: str, flavor: str, **sections) -> Config:
        degrees = LAYOUTS[name].parallelism
        dump = folder / flavor / name.replace(" ", "-")
        return runs.make_config(data, dump, flavor=flavor, steps=3, parallelism=degrees, **sections)

    def run(name: str, flavor: str) -> dict[int, float]:
        checkpoint = folder / flavor / "seed"
        if not checkpoint.exists():
            seed(config("fsdp 2 tp 2 pp 2", flavor, debug={"seed": 5}), checkpoint)
        if (name, flavor) not in told:
            # the run's own seed, 0, gives other weights: they show if nothing was loaded
            settings = config(name, flavor, checkpoint={"initial_load_path": str(checkpoint), "enable": False})
            assert not any(pools[LAYOUTS[name].world_size].run(runs.run, settings))
            told[name, flavor] = runs.read_losses(Path(settings.job.dump_folder))
        return told[name, flavor]

    return run


@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        ("fsdp 2", "debug_gqa"),
        ("tp 2", "debug_gqa"),
        ("cp 2", "debug_gqa"),
        ("pp 2", "debug_tied"),
        ("fsdp 2 cp 2", "debug_gqa"),
        ("fsdp 2 tp 2 pp 2", "debug_tied"),
    ],
)
def test_the_same_seed_checkpoint_gives_the_same_losses(from_seed, name, flavor):
    one, many = from_seed("one rank", flavor), from_seed(name, flavor)
    assert one.keys() == many.keys() == {1, 2, 3}
    assert list(many.values()) == pytest.approx(list(one.values()), abs=5e-6, rel=0)
