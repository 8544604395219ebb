"""All ranks of a job have the same config: on several machines each reads its own file."""

import torch.distributed as dist

from converters.common.errors import ConfigError, list_offenders
from trainer.config.load import origins
from trainer.config.sections import Config
from trainer.ranks.agree import on_each

_OF_A_MACHINE = ("_path", ".dataset_mix", ".custom_import")  # ends of keys: machines may have files in other places


def require_same_config(config: Config, group: dist.ProcessGroup) -> None:
    """Raise ConfigError on all ranks, with the keys that differ, if one has another config than rank 0."""
    settings = {key: repr(setting.value) for key, setting in origins(config).items() if not key.endswith(_OF_A_MACHINE)}
    by_rank = on_each(group, lambda: settings)
    other = next((rank for rank, values in enumerate(by_rank) if values != by_rank[0]), None)
    if other is not None:
        pairs = ((key, value, by_rank[other].get(key)) for key, value in by_rank[0].items())
        differing = [f"{key}: {a} on rank 0, {b} on rank {other}" for key, a, b in pairs if a != b]
        raise ConfigError(
            "ranks have different configs:" + list_offenders(differing),
            hint="each machine reads its own file: is it an old copy on one of them?",
        )
