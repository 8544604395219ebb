"""Tests that run in a folder only, and not in the store, are few."""

import ast
from pathlib import Path

from tests.uploaded import MODULES, OF_FOLDERS

TESTS = Path(__file__).resolve().parents[1]


def test_nine_of_ten_tests_of_these_modules_run_in_the_store():
    names = {
        f"{module}::{node.name}"
        for module in MODULES
        for node in ast.parse((TESTS / module).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert OF_FOLDERS.keys() <= names and all(OF_FOLDERS.values())
    assert len(OF_FOLDERS) <= len(names) / 10, f"{len(OF_FOLDERS)} of {len(names)}"
    for module in MODULES:
        assert "in_store(request, monkeypatch" in (TESTS / module).read_text(), module
