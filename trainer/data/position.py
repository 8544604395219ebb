"""Check that a checkpoint's data position belongs to this run's data."""

from collections.abc import Mapping
from typing import Any

from converters.errors import DataError

STATE_VERSION = 1
BEST_FIT = "best_fit"  # before the seq_len of a fingerprint, where samples are packs of documents
STREAMS = " streams"  # after their number, at the end of a stream's fingerprint; that of an index ends in its seq_len
RESTART_DATA = "--checkpoint.exclude_from_loading dataloader"  # resume weights, restart the data


def refuse_other_position(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise DataError unless `state` has the keys, the version, the data and the seed of `expected`."""
    if set(state) != set(expected) or state["version"] != STATE_VERSION:
        raise DataError(
            f"the checkpoint's data position is not one that this titan wrote: {dict(state)}", tries=[RESTART_DATA]
        )
    _refuse_other_data(str(state["fingerprint"]), expected["fingerprint"])
    if state["seed"] != expected["seed"]:
        raise DataError(
            f"the run was begun with seed {state['seed']}, and is to be resumed with seed {expected['seed']}",
            hint="another seed is another order of the data: samples would be repeated or left out",
            tries=[f"--debug.seed {state['seed']}", RESTART_DATA],
        )


def _refuse_other_data(theirs: str, ours: str) -> None:
    if theirs == ours:
        return
    (head, _, now), (their_head, _, was) = ours.rpartition("/"), theirs.rpartition("/")
    if head and head == their_head and now.endswith(STREAMS):
        raise DataError(
            f"the run was begun with {was}, and is to be resumed with {now}",
            hint="each stream has a part of the text to itself, and its own position in it",
            tries=[f"--training.dataset_streams {was.removesuffix(STREAMS)}", RESTART_DATA],
        )
    packed = f"/{BEST_FIT}"
    if head and head != their_head and head.removesuffix(packed) == their_head.removesuffix(packed):
        then = "best_fit" if their_head.endswith(packed) else "concatenated"
        raise DataError(
            f"the run was begun with training.packing = {then}, and is to be resumed with another one",
            hint="other samples are made of the same documents, so the position says nothing about the new ones",
            tries=[f"--training.packing {then}", RESTART_DATA],
        )
    if head and head == their_head:
        raise DataError(
            f"the run was begun with seq_len {was}, and is to be resumed with {now}",
            hint="samples are cut by seq_len, so the position in the old samples says nothing about the new ones",
            tries=[f"--training.seq_len {was}", RESTART_DATA],
        )
    raise DataError(
        f"the data is not that of the checkpoint: fingerprint {ours} now, {theirs} then",
        hint="the text, its sources, the tokenizer or the index changed; going on would repeat or leave out samples",
        tries=[RESTART_DATA],
    )
