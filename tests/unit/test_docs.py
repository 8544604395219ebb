"""The pages for users tell the truth as far as can be checked: TOML loads, commands, options and links exist."""

import re
from pathlib import Path

import pytest
import typer

from titan_tools.cli import app
from trainer.config.load import load_config
from trainer.config.preset import preset_names
from trainer.config.sections import Parallelism

ROOT = Path(__file__).resolve().parents[2]
TRAINING, INFERENCE = ((ROOT / "docs" / name).read_text() for name in ("training.md", "inference.md"))


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TRAINING, re.S)


@pytest.mark.parametrize("text", blocks("toml"), ids=lambda text: text.split("\n")[0])
def test_toml_of_the_training_page_loads(text, tmp_path):
    path = tmp_path / "page.toml"
    path.write_text(text)
    assert load_config(path).origins


def test_commands_scripts_and_links_of_the_training_page_exist():
    known = {info.name for info in app.registered_commands} | {group.name for group in app.registered_groups}
    used = set(re.findall(r"^(?:\$ )?titan (\S+)", "\n".join(blocks("(?:bash|console)")), re.M))
    assert used and used <= known
    for path in re.findall(r"scripts/[\w.]+", TRAINING):
        assert (ROOT / path).is_file(), path
    for page in re.findall(r"\]\((\w+\.md)\)", TRAINING):
        assert (ROOT / "docs" / page).is_file(), page


def test_the_training_page_names_every_schedule_and_preset():
    schedules = Parallelism.__annotations__["pipeline_parallel_schedule"].__args__
    assert [name for name in schedules if f"| `{name}` |" not in TRAINING] == []
    for name in preset_names():
        family, _, size = name.partition("_")
        assert f"`{name}`" in TRAINING or (family in TRAINING and f"`_{size}`" in TRAINING), name


def test_the_page_on_inference_names_every_option_and_no_other():
    command = typer.main.get_command(app).commands["infer"]
    options = {name for p in command.params if not getattr(p, "hidden", False) for name in p.opts if name[:2] == "--"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", INFERENCE)) == options - {"--help"}
