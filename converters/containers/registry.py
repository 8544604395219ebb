"""The containers that checkpoints are opened from, in the order in which a folder is asked for them."""

from collections.abc import Collection

from converters.common.extensions import check_name, check_record
from converters.common.names import MANIFEST
from converters.containers.base import Container
from converters.containers.dcp import DCP
from converters.containers.meta_shards import META
from converters.containers.safetensors import SAFETENSORS
from converters.containers.torch_folder import TORCH

CONTAINERS: dict[str, Container] = {c.name: c for c in (DCP, SAFETENSORS, TORCH, META)}
_BUILT_IN = frozenset(CONTAINERS)


def register(container: Container) -> None:
    """Add a container under its name. Raises ExtensionError for fields of other types."""
    check_record(container, Container, f"container {getattr(container, 'name', '')!r}")
    check_name("container", container.name, CONTAINERS)
    CONTAINERS[container.name] = container


def replaceable() -> tuple[str, ...]:
    """Patterns of names, one of which a folder must have to be replaced. Many projects have a config.json."""
    return (MANIFEST, *(pattern for container in CONTAINERS.values() for pattern in container.replaceable))


def index_suffixes() -> tuple[str, ...]:
    """The suffixes of files that say what files of weights have."""
    return (".json", *(suffix for container in CONTAINERS.values() for suffix in container.index_suffixes))


def has_state_marks(names: Collection[str]) -> bool:
    """Whether a folder with these names has a training state, in a container that keeps whole ones."""
    return any(container.marks(names) for container in CONTAINERS.values() if container.keeps_state)


def registered() -> dict[str, Container]:
    """The containers that are not built in."""
    return {name: container for name, container in CONTAINERS.items() if name not in _BUILT_IN}


def weight_suffixes() -> tuple[str, ...]:
    """The suffixes of files of weights, those of other tools included: no output folder has such a name."""
    return (".gguf", *(suffix for container in CONTAINERS.values() for suffix in container.suffixes))
