"""Ranks read checkpoint, tokenizer and batch each for itself, on machines of their own too: it must be the same."""

from hashlib import blake2b
from typing import Any

import torch.distributed as dist

from converters.errors import ConfigError, list_offenders
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.ranks.machine import own_machine
from titan_tools.infer.task import Work

Read = dict[str, tuple[str, str]]  # what → its identity, and where this rank found it


def require_same_inputs(work: Work, ranks: Ranks) -> None:
    """Raise ConfigError on all ranks where one has read something else than the first. All of them must call this."""
    if ranks.tp == 1:
        return
    found: list[Any] = [None] * ranks.tp
    dist.all_gather_object(found, inputs_of(work), group=ranks.talk)
    check_inputs(found)


def inputs_of(work: Work) -> Read:
    """All that a rank reads for itself and tokens depend on, by what it is. The options are the first rank's."""
    request, template = work.request, work.template
    vocabulary = (work.vocabulary.prefix, sorted(work.vocabulary.stop_ids), work.vocabulary.stop_strings)
    kept = {
        "checkpoint": (work.origin.weights, work.origin.checkpoint),
        "model": (repr(work.args), request.model_from or work.origin.checkpoint),
        "tokenizer": (work.origin.tokenizer + repr(vocabulary), request.model_from or work.origin.checkpoint),
    }
    if template is not None:
        kept["chat template"] = template.identity, request.model_from or work.origin.checkpoint
    if request.batch is not None:
        kept["batch"] = work.batch_digest.hexdigest(), request.batch
    name = own_machine()[0]
    return {
        what: (blake2b(identity.encode("utf-8", "surrogatepass")).hexdigest(), f"{path.absolute()} on {name}")
        for what, (identity, path) in kept.items()
    }


def check_inputs(found: list[Read]) -> None:
    """Raise ConfigError where ranks have `found` different things, with every rank's place of the first such thing."""
    for what, (identity, _) in found[0].items():
        if any(read[what][0] != identity for read in found):
            same = [read[what][0] == identity for read in found]
            places = [
                f"rank {rank}: {read[what][1]}" + ("" if alike else ", which is another one")
                for rank, (read, alike) in enumerate(zip(found, same, strict=True))
            ]
            raise ConfigError(
                f"ranks do not read the same {what}:" + list_offenders(places, most=64),
                hint="all of them need the same files, on every machine, which nothing changes while they start",
            )
