"""`titan models`: every family with its flavors, and only formats and commands that work."""

import io
import json
import sys

import pytest

from converters.common.errors import ConfigError, UnsupportedError
from converters.families.registry import all_families, get_family
from converters.formats.base import OutputOptions
from converters.formats.registry import FORMATS, get_format
from converters.quantized.quantization import SPELLINGS
from titan_tools.commands.models import models
from titan_tools.model_list import list_models
from trainer.models.registry import get_trainer_family


def test_every_flavor_is_listed(capsys):
    models(as_json=True)
    families = json.loads(capsys.readouterr().out)["families"]
    assert [f["family"] for f in families] == list(all_families())
    for family in families:
        known = get_family(family["family"])
        assert {f["flavor"]: f["parameters"] for f in family["flavors"]} == {
            name: known.num_parameters(args) for name, args in known.flavors.items()
        }
    models()
    shown = capsys.readouterr().out
    for text in ("qwen3", "32,762,123,264", "68,976,648,192", "Qwen3ForCausalLM", "torchtune"):
        assert text in shown


@pytest.mark.parametrize("listed", list_models(), ids=lambda listed: listed["family"])
def test_listed_formats_and_commands_work(listed):
    family = get_family(listed["family"])
    assert "convert" in listed["commands"] and {"dcp", "hf", "torch"} <= set(listed["formats"])
    for name, output in FORMATS.items():
        if name in listed["formats"]:
            output.naming(family, OutputOptions())
        else:
            with pytest.raises(UnsupportedError):
                output.naming(family, OutputOptions())
    for text in SPELLINGS:
        if text in listed["quantize"]:
            get_format("hf").naming(family, OutputOptions(quantize=text))
        else:
            with pytest.raises(ConfigError, match=f"--quantize {text}: no {family.name} models are published so"):
                get_format("hf").naming(family, OutputOptions(quantize=text))
    assert "train" not in listed["commands"] or get_trainer_family(family.name)
    assert ("meta" in listed["formats"]) == (family.meta is not None)


def test_a_terminal_of_80_columns_shows_names_and_sizes(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", stream := Terminal())
    models()
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].split()[:4] == ["family", "flavor", "parameters", "active"]
