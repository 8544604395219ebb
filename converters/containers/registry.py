"""The containers that checkpoints are opened from, in the order in which a folder is asked for them."""

from collections.abc import Mapping

from converters.containers.base import Container
from converters.containers.dcp import DCP
from converters.containers.meta_shards import META
from converters.containers.safetensors import SAFETENSORS
from converters.containers.torch_folder import TORCH

CONTAINERS: Mapping[str, Container] = {c.name: c for c in (DCP, SAFETENSORS, TORCH, META)}
# Of files of weights, those of other tools included: no output folder has such a name.
WEIGHT_SUFFIXES = frozenset((".gguf", *(suffix for c in CONTAINERS.values() for suffix in c.suffixes)))
