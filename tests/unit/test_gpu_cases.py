"""The configs of tests/gpu and of the benchmark are valid, which only a machine with a GPU would show otherwise."""

import pytest

from tests.gpu.running import write_job
from tests.gpu.test_infer import ASK, COMMANDS
from tests.gpu.test_training import CASES
from titan_tools.infer import run
from titan_tools.infer.request import check_options
from trainer.config.load import load_config
from trainer.job import resolve_job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("options", [options for options, _ in CASES], ids=" ".join)
def test_the_options_of_a_gpu_test_fit_its_job(job, options):
    config = load_config(job, options)
    assert resolve_job(config, 1).dims.world_size == 1


@pytest.mark.parametrize("options", [options for options, _ in COMMANDS], ids=" ".join)
def test_the_options_of_a_gpu_test_of_inference_go_together(titan, monkeypatch, options):
    asked = []
    monkeypatch.setattr(run, "infer", asked.append)
    code, _, err = titan("infer", "somewhere", *ASK, *options)
    assert code == 0, err
    check_options(*asked)
