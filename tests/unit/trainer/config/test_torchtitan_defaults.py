"""The table of docs/training.md, "Differences from torchtitan", against torchtitan 0.2.2's own config classes."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from tests.torchtitan_release import torchtitan
from trainer.config.load import load_config, origins
from trainer.config.refused import REFUSED
from trainer.config.show import toml_text

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "training.md").read_text()
NO_KEY = "no key"
MARKED = "Not in torchtitan"  # in the docstrings of trainer/config/sections.py


def documented() -> dict[str, tuple[str, str]]:
    """Each key of the table: torchtitan's default and ours, as written."""
    section = PAGE.partition("## Differences from torchtitan\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+\.\w+)` \| ([^|]+) \| `([^|]+)` \| ([^|]+) \|$", section, re.M)
    assert len(rows) == len({key for key, *_ in rows}) and all(why.strip() for *_, why in rows)
    return {key: (theirs, ours) for key, theirs, ours, _ in rows}


def our_defaults(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "empty.toml").write_text("")
    return {key: toml_text(setting.value) for key, setting in origins(load_config(tmp_path / "empty.toml")).items()}


def flat(record: object, before: str = "") -> Iterator[tuple[str, object]]:
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            yield from flat(value, f"{before}{field.name}.")
        else:
            yield f"{before}{field.name}", tuple(value) if isinstance(value, list) else value


def test_the_table_has_our_defaults_and_every_key_that_only_titan_has(tmp_path):
    ours, table = our_defaults(tmp_path), documented()
    assert {key: value for key, (_, value) in table.items()} == {key: ours[key] for key in table}
    only_ours = {key for key, (theirs, _) in table.items() if theirs.startswith(NO_KEY)}
    source = (Path(__file__).resolve().parents[4] / "trainer/config/sections.py").read_text()
    assert len(only_ours) == len(re.findall(MARKED.replace(" ", r"\s+"), source))


@pytest.mark.slow
def test_the_table_has_every_default_that_differs_and_no_other(tmp_path):
    with torchtitan("config.job_config") as (module,):
        theirs = {key: toml_text(value) for key, value in flat(module.JobConfig())}
    ours = our_defaults(tmp_path)
    assert len(theirs) > 140
    assert sorted(theirs.keys() - ours.keys()) == sorted(REFUSED)  # nothing is unknown here, and nothing made up
    differing = {key: (f"`{theirs[key]}`", ours[key]) for key in ours if key in theirs and ours[key] != theirs[key]}
    table = documented()
    assert {key: row for key, row in table.items() if not row[0].startswith(NO_KEY)} == differing
    assert {key for key, row in table.items() if row[0].startswith(NO_KEY)} == ours.keys() - theirs.keys()


@pytest.mark.slow
def test_torchtitans_own_defaults_are_accepted_when_written_out(tmp_path):
    with torchtitan("config.job_config") as (module,):
        theirs = dict(flat(module.JobConfig()))
    lines = [f"{key} = {toml_text(value)}" for key, value in theirs.items() if value is not None]
    (tmp_path / "all.toml").write_text("\n".join(lines))
    assert len(load_config(tmp_path / "all.toml").origins) == len(lines)
