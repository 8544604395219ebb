"""Parse the cells of a published row, in the spellings that its sources use. Torch-free.

Each function raises ConfigError for an unknown text, UnsupportedError for what is known but not rebuilt.
"""

import re
from dataclasses import dataclass
from typing import Literal

from converters.common.errors import ConfigError, UnsupportedError
from converters.families.registry import get_family
from titan_tools.memory.replay.allocator import AllocatorName
from trainer.ranks.gpus import GPUS, Gpu

NormName = Literal["python", "native", "fused"]
Float8Name = Literal["", "tensorwise", "tensorwise, float8 all-gather", "rowwise", "rowwise_with_gw_hp"]
MetricName = Literal["allocated", "active", "reserved"]

_FAMILIES = {
    ("llama", "2"): "llama2",
    ("llama", "3"): "llama3",
    ("qwen", "3"): "qwen3",
    ("deepseek", "3"): "deepseek_v3",
}
_MODEL = re.compile(r"(llama|qwen|deepseek)[ _-]*v?(\d)(?:\.\d)?[ _-]+([\d.]+)b(?:-a([\d.]+)b)?\b", re.IGNORECASE)
_NOT_REBUILT = re.compile(r"gpt-oss", re.IGNORECASE)
_GPUS = {"A100": "a100-80", "H100": "h100-96", "H200": "h200", "B200": "b200"}  # its kernels; its size is a column
_SCHEDULES = {
    name.lower(): name
    for name in ("1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
}
_RELEASES = {"0.1.0": "2025-05-02", "0.2.0": "2025-10-18", "0.2.1": "2025-12-26", "0.2.2": "2026-02-20"}
_NO = ("", "0", "no", "none", "off", "false", "-")
_YES = ("1", "yes", "on", "true")


@dataclass(frozen=True, slots=True)
class Loss:
    """How the loss of whole logits was computed."""

    num_chunks: int = 0  # of the logits; 0: not in chunks
    has_wide_logits: bool = False  # the model itself ended in fp32
    is_compiled: bool = False


def count(text: str, *, otherwise: int | None = None) -> int:
    """A whole number ≥ 1; `otherwise` where the cell is empty."""
    if not text and otherwise is not None:
        return otherwise
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ConfigError(f"{text!r} is no whole number ≥ 1")
    return int(text)


def gib(text: str) -> float:
    """GiB, more than none."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10_000:
        raise ConfigError(f"{text!r} is no number of GiB")
    return number


def peak_gib(text: str) -> float | None:
    """None where the run ran out of memory."""
    return None if text.lower() in ("oom", "out of memory") else gib(text)


def date(text: str) -> str:
    """ISO, or a range that begins with one: it says what torchtitan was built of."""
    if not re.match(r"\d{4}-\d{2}", text):
        raise ConfigError(f"{text!r} begins with no year and month (2025-08)")
    return text


def release_date(stack: str) -> str | None:
    """The date of the torchtitan release that a row names in place of a date; None where it names none."""
    found = re.search(r"\bv?(\d\.\d\.\d)\b", stack)
    return _RELEASES.get(found[1]) if found else None


def gpu(text: str) -> Gpu:
    """The type whose kernels ran."""
    for part, name in _GPUS.items():
        if part in text.upper():
            return GPUS[name]
    raise ConfigError(f"{text!r} is no hardware that is known: {', '.join(_GPUS)}")


def model(text: str) -> tuple[str, str]:
    """Family and flavor."""
    found = _MODEL.match(text)
    family = _FAMILIES.get((found[1].lower(), found[2])) if found else None
    if _NOT_REBUILT.match(text):
        raise UnsupportedError(f"torchtitan's {text.partition(' ')[0]} of that date is not rebuilt")
    if family is None:
        raise ConfigError(f"no model of ours is called {text!r}: {', '.join(_FAMILIES.values())}, with their sizes")
    flavor = f"{found[3]}B" + (f"-A{found[4]}B" if found[4] else "")
    if flavor not in (flavors := get_family(family).flavors):
        raise ConfigError(f"{family} has no size {flavor}: {', '.join(flavors)}")
    return family, flavor


def checkpointing(text: str) -> tuple[str, str]:
    """Mode and option of activation checkpointing. By layer torchtitan took every second one by default."""
    words = text.lower().replace("_", "-").replace(" ", "-")
    if words in _NO:
        return "none", "op"
    if words == "full":
        return "full", "op"
    if found := re.fullmatch(r"(?:selective-)?(op|layer|[1-9]\d*)|selective-layer-([1-9]\d*)", words):
        option = found[1] or found[2]
        return "selective", "2" if option == "layer" else option
    raise ConfigError(f"{text!r} is none of none, full, selective-op, selective-layer, selective-2")


def flag(text: str) -> bool:
    """Whether something was on."""
    if text.lower() not in _NO + _YES:
        raise ConfigError(f"{text!r} is neither 0 nor 1")
    return text.lower() in _YES


def float8(text: str) -> Float8Name:
    """Its recipe, empty where the run had none. Scaled by tensor, in bf16 over FSDP, where nothing else is said."""
    words = text.lower().replace("_", " ").replace("-", " ").replace("bfloat", "bf")
    if words.strip() in ("", "bf16", *_NO):
        return ""
    if "mx" in words or "block" in words:
        raise UnsupportedError(f"float8 recipe {text!r} is not ours")
    if "rowwise" in words or "row wise" in words:
        return "rowwise_with_gw_hp" if "gw hp" in words else "rowwise"
    if "tensor" in words or "float8" in words or "fp8" in words or "dynamic" in words or words in _YES:
        gathers = "all gather" in words and "bf16 all gather" not in words or re.search(r"\+ ?fsdp", words)
        return "tensorwise, float8 all-gather" if gathers else "tensorwise"
    raise ConfigError(f"{text!r} is none of none, tensorwise, tensorwise + fp8 all-gather, rowwise")


def loss(text: str) -> Loss:
    """Plain where nothing else is said. Of chunks there were eight where no number is (#996)."""
    words = text.lower()
    num_chunks = 0
    if "chunk" in words:
        found = re.search(r"(\d+) *chunks|chunk(?:ed|s)?\D{0,4}(\d+)", words)
        num_chunks = int(found[1] or found[2]) if found else 8
    elif words and not re.search(r"\bce\b|cross.?entropy|plain|logits|compiled|loss.parallel", words):
        raise ConfigError(f"{text!r} is none of CE fp32 cast, compiled CE, chunked CE (8 chunks), fp32 logits")
    is_compiled = "compiled" in words and not re.search(r"(not|un) ?compiled", words)
    return Loss(num_chunks, "fp32 logits" in words, is_compiled)


def norm(text: str) -> NormName | None:
    """None where nothing is said. What a compiler makes of a norm keeps what the fused kernels keep."""
    words = text.lower()
    for name, kind in (("python", "python"), ("fused", "fused"), ("compiled", "fused"), ("native", "native")):
        if name in words:
            return kind
    if words:
        raise ConfigError(f"{text!r} is none of python RMSNorm, native RMSNorm, fused RMSNorm, compiled RMSNorm")
    return None


def metric(text: str) -> MetricName:
    """What was counted."""
    if text in ("allocated", "active", "reserved"):
        return text
    if "smi" in text.lower():
        raise UnsupportedError(f"of what {text} shows an interval is estimated, no number")
    raise ConfigError(f"{text!r} is none of allocated, active, reserved")


def schedule(text: str) -> str:
    """As torch calls it; 1F1B, torchtitan's default, where nothing is said."""
    squeezed = re.sub(r"[ _-]|schedule", "", text.lower()) or "1f1b"
    if squeezed not in _SCHEDULES:
        raise UnsupportedError(f"pipeline schedule {text!r} is none of {', '.join(_SCHEDULES.values())}")
    return _SCHEDULES[squeezed]


def allocator(text: str) -> AllocatorName | None:
    """None where nothing is said."""
    words = text.lower()
    if "expandable" in words:
        return "expandable" if "false" not in words else "classic"
    if words in ("classic", "default", "native"):
        return "classic"
    if words in ("", "?", "unknown"):
        return None
    raise ConfigError(f"{text!r} is none of classic, expandable")


def has_async_tp(*texts: str) -> bool:
    """Whether a row's words mention asynchronous tensor parallelism."""
    words = re.sub(r"[ _-]", "", " ".join(texts).lower())
    return bool(re.search(r"(?<!no)(?<!without)(?<!w/o)async(tp|tensor)", words))
