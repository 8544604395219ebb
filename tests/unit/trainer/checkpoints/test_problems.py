"""Checkpoint settings that contradict each other are refused, each with what would do."""

from pathlib import Path

import pytest

from converters.model.model_info import ModelInfo
from converters.store.location import Location
from trainer.checkpoints import problems as module
from trainer.checkpoints.problems import (
    checkpoint_machine_problems,
    checkpoint_problems,
    dropout_note,
    export_dtype_note,
    initial_path,
)
from trainer.config.sections import Checkpoint, Model


def _problems(model=None, **keys):
    return checkpoint_problems(Checkpoint(**keys), model or Model())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"last_save_in_hf": True}, ["last_save_in_hf converts the last step's checkpoint, and none is saved"]),
        ({"last_save_in_torchtune": True, "enable": True, "load_only": True}, ["last_save_in_torchtune converts"]),
        ({"initial_load_in_hf": True, "initial_load_path": "x", "initial_load_model_only": False}, ["weights only"]),
        ({"initial_load_in_hf": True}, ["names no folder: set checkpoint.initial_load_path or model.hf_assets_path"]),
        ({"initial_load_in_hf_quantized": True, "initial_load_path": "x"}, ["needs checkpoint.initial_load_in_hf"]),
        (
            {"initial_load_in_hf": True, "initial_load_model_only": False, "last_save_in_hf": True},
            ["last_save_in_hf", "weights only", "names no folder"],
        ),
    ],
)
def test_what_contradicts_itself_is_reported_all_at_once(keys, message):
    found = _problems(**keys)
    assert len(found) == len(message) and all(t in f for t, f in zip(message, found, strict=True))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"enable": True, "export_dtype": "float16"},
        {"enable": True, "last_save_in_hf": True, "export_dtype": "bfloat16"},
        {"enable": True, "last_save_model_only": True, "export_dtype": "float16"},
        {"enable": True, "async_mode": "async_with_pinned_mem", "last_save_in_torchtune": True},
        {"initial_load_in_hf": True, "initial_load_path": "folder"},
    ],
)
def test_what_goes_together_is_let_through(keys):
    assert _problems(**keys) == []


@pytest.mark.parametrize("key", ["last_save_model_only", "last_save_in_hf", "last_save_in_torchtune"])
def test_a_dtype_that_nothing_is_exported_in_is_reported(key):
    message = export_dtype_note(Checkpoint(export_dtype="float16"))
    assert message.startswith("checkpoint.export_dtype = 'float16' has no effect") and key in message
    assert export_dtype_note(Checkpoint()) == export_dtype_note(Checkpoint(export_dtype="float16", **{key: True})) == ""


def test_where_a_run_starts_from():
    named = Model(hf_assets_path="b")
    assert initial_path(Checkpoint(), Model()) is None
    assert initial_path(Checkpoint(initial_load_path="a"), Model()) == Location("a")
    assert initial_path(Checkpoint(initial_load_path="a", initial_load_in_hf=True), named) == Location("a")
    assert initial_path(Checkpoint(initial_load_in_hf=True), named) == Location("b")
    assert _problems(named, initial_load_in_hf=True) == []


def test_a_process_that_shares_memory_needs_linux(monkeypatch):
    settings = Checkpoint(async_mode="async_with_pinned_mem")
    assert checkpoint_machine_problems(settings) == []
    monkeypatch.delattr(module.os, "memfd_create")
    (message,) = checkpoint_machine_problems(settings)
    assert "needs Linux" in message
    assert checkpoint_machine_problems(Checkpoint(async_mode="async")) == []


def test_dropout_that_initial_weights_ask_for_is_said_to_have_no_effect():
    def message(**fields):
        return dropout_note(ModelInfo("llama3", None, untranslated=fields), Path("x"))

    assert message() == message(attention_dropout=0.0, use_cache=False) == ""
    assert message(attention_dropout=0.1, use_cache=False).startswith(
        "x: attention_dropout = 0.1 is kept for exports and"
    )
