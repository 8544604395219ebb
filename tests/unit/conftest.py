"""What holds in every unit test."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch):
    """Do not sync files: it is a tenth of a tiny conversion. Tests of the order of writes record the calls."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
