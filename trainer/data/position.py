"""Check that a checkpoint's data position belongs to this run's data."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from converters.common.errors import DataError
from trainer.data.sample import Packing

STATE_VERSION = 1
POSITION_KEYS = ("version", "fingerprint", "seed", "consumed_samples")  # of a TokenLoader
STREAMS = " streams"  # after their number, at the end of a stream's fingerprint; that of an index ends in its seq_len
RESTART_DATA = "--checkpoint.exclude_from_loading dataloader"  # resume weights, restart the data


@dataclass(frozen=True, slots=True)
class Cut:
    """The settings by which samples are cut from the tokens of their sources: training.packing and training.seq_len."""

    packing: Packing
    seq_len: int


class CutSamples(Protocol):
    """Samples of an index. Their fingerprint ends in `/` and seq_len."""

    cut: Cut

    def fingerprint_of(self, cut: Cut) -> str:
        """The fingerprint of samples of the same sources, cut otherwise."""
        ...


def refuse_other_position(
    state: Mapping[str, Any], expected: Mapping[str, Any], samples: CutSamples | None = None
) -> None:
    """Raise DataError unless `state` has the keys, the version, the data and the seed of `expected`.

    `samples`: those that the position is in, unless it is in streams.
    """
    if set(state) != set(expected) or state["version"] != STATE_VERSION:
        raise DataError(
            f"the checkpoint's data position is not one that this titan wrote: {dict(state)}", tries=[RESTART_DATA]
        )
    if samples is not None:
        _refuse_other_cut(str(state["fingerprint"]), samples)
    _refuse_other_data(str(state["fingerprint"]), expected["fingerprint"])
    if state["seed"] != expected["seed"]:
        raise DataError(
            f"the run was begun with seed {state['seed']}, and is to be resumed with seed {expected['seed']}",
            hint="another seed is another order of the data: samples would be repeated or left out",
            tries=[f"--debug.seed {state['seed']}", RESTART_DATA],
        )


def _refuse_other_cut(saved: str, samples: CutSamples) -> None:
    """Raise DataError if `saved` is the fingerprint of the same sources, cut otherwise."""
    seq_len = saved.rpartition("/")[2]
    is_number = seq_len.isdecimal() and len(seq_len) <= len(str(sys.maxsize))
    cuts = [Cut(packing, int(seq_len)) for packing in get_args(Packing)] if is_number else []
    was, now = next((cut for cut in cuts if samples.fingerprint_of(cut) == saved), samples.cut), samples.cut
    tries = [f"--training.packing {was.packing}"] if was.packing != now.packing else []
    tries += ["--training.document_mask offsets"] if tries and was.packing == "best_fit" else []
    tries += [f"--training.seq_len {was.seq_len}"] if was.seq_len != now.seq_len else []
    if was.packing != now.packing:
        raise DataError(
            f"the run was begun with training.packing = {was.packing}, and is to be resumed with another one",
            hint="other samples are made of the same documents, so the position says nothing about the new ones",
            tries=[" ".join(tries), RESTART_DATA],
        )
    if tries:
        raise DataError(
            f"the run was begun with seq_len {was.seq_len}, and is to be resumed with {now.seq_len}",
            hint="samples are cut by seq_len, so the position in the old samples says nothing about the new ones",
            tries=[*tries, RESTART_DATA],
        )


def _refuse_other_data(saved: str, current: str) -> None:
    if saved == current:
        return
    (head, _, now), (their_head, _, was) = current.rpartition("/"), saved.rpartition("/")
    if head and head == their_head and now.endswith(STREAMS):
        raise DataError(
            f"the run was begun with {was}, and is to be resumed with {now}",
            hint="each stream has a part of the text to itself, and its own position in it",
            tries=[f"--training.dataset_streams {was.removesuffix(STREAMS)}", RESTART_DATA],
        )
    raise DataError(
        f"the data is not that of the checkpoint: fingerprint {current} now, {saved} then",
        hint="the text, its sources or their weights, the tokenizer, training.special_tokens or the index changed;"
        " going on would repeat or leave out samples",
        tries=[RESTART_DATA],
    )
