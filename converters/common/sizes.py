"""Units of size, and sizes as people read and write them."""

from converters.common.errors import ConfigError

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}


def format_bytes(num_bytes: float) -> str:
    """A size for people: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def parse_shard_size(text: str) -> int:
    """`5GB` (10⁹, as Hugging Face counts), `500MiB`, or plain bytes. Raises ConfigError."""
    number = text.rstrip("KMGTIBkmgtib ")
    unit = text[len(number) :].strip().upper()
    if unit not in _UNITS or not number.replace(".", "", 1).isdecimal() or float(number) <= 0:
        raise ConfigError(f"invalid size for --shard-size: {text!r}", tries=["--shard-size 5GB", "--shard-size 500MiB"])
    return max(1, int(float(number) * _UNITS[unit]))
