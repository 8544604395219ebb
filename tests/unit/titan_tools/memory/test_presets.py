"""Presets of mixtures of experts fit 80-GB GPUs in the number that `titan config init` names."""

import re

import pytest

from titan_tools.memory.command import estimate_from_command_line
from trainer.config.load import load_config
from trainer.config.preset import describe_presets

EXPERTS = {
    name: int(re.search(r"(\d+) GPUs", text)[1])
    for name, text in describe_presets()
    if load_config(name).parallelism.expert_parallel_degree > 1 and "GPUs" in text
}


def test_there_are_some():
    assert EXPERTS["qwen3_30b_a3b"] == 16 and EXPERTS["deepseek_v3_671b"] == 512 and len(EXPERTS) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_it_fits(name, capsys):
    assert estimate_from_command_line(name, (), world_size=EXPERTS[name], gpu_text="h100-80", as_json=True) == 0
    assert '"fits": true' in capsys.readouterr().out
