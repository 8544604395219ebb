"""Batches in pinned memory: what a GPU gets from it, also while the host goes on, is what the CPU reads."""

from itertools import islice

import numpy as np
import pytest
import torch

from tests.gpu.running import read_losses, titan, write_job
from trainer.data.loader import TokenLoader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Tokens:
    fingerprint, vocab_size, unigram_entropy = "f", 60_000, None

    def tokens(self, split: str) -> np.ndarray:
        return np.arange(50_000, dtype=np.uint16)


def test_pinned_batches_arrive_whole_though_nobody_waits_for_the_copy():
    keys = {"seq_len": 64, "global_batch_size": 8, "dp_rank": 0, "dp_degree": 1, "seed": 0}
    pinned, plain = (TokenLoader(Tokens(), "train", pin_memory=pin, **keys) for pin in (True, False))
    copies = []
    for batch in islice(pinned, 50):
        assert batch.tokens.is_pinned() and batch.targets.is_pinned()
        copies.append((batch.tokens.to("cuda", non_blocking=True), batch.targets.to("cuda", non_blocking=True)))
    for (tokens, targets), batch in zip(copies, plain, strict=False):
        assert torch.equal(tokens.cpu(), batch.tokens) and torch.equal(targets.cpu(), batch.targets)


def test_a_run_on_pinned_batches_is_the_run_without(tmp_path):
    config = write_job(tmp_path)
    for name, options in (("plain", ()), ("pinned", ("--training.dataloader.pin_memory",))):
        titan("train", config, "--nproc", 1, "--job.dump_folder", tmp_path / name, *options)
    assert read_losses(tmp_path / "pinned") == read_losses(tmp_path / "plain")
