"""Run a command line in this process and describe what it did: exit code, JSON keys, SHA-256 of every output file."""

import io
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import chdir
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import typer

_NUMBERS = re.compile(r"num_\w+|resumed_bytes|equal|ok|step")  # JSON values that depend on nothing but the input
_COMMENT = re.compile(rb"(?m)^\s*#.*\n|[ \t]+#.*$")  # of YAML and TOML: wording

# The kernels that every x86-64 processor has, and one thread: a training run gives the same bits on all of them.
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",
    "LC_ALL": "C.UTF-8",
    "COLUMNS": "120",
    "HF_HUB_OFFLINE": "1",
}
LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTORCH_ALLOC_CONF", "TITAN_IMPORT", "PYTHONWARNINGS")


def start_again_in_environment(module: str) -> None:
    """Replace this process by one with ENVIRONMENT, which torch reads as it is loaded, unless it has that already."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT} | ENVIRONMENT
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)


def titan(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    from titan_tools import cli

    if not hasattr(typer.main.get_command, "cache_info"):  # the commands are the same each time, and slow to build
        typer.main.get_command = lru_cache(maxsize=8)(typer.main.get_command)
    kept = sys.argv, sys.stdout, sys.stderr
    sys.argv = ["titan", *map(str, arguments)]
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    try:
        code = cli.run()
    except BaseException:
        traceback.print_exc()
        code = -1
    finally:
        texts = [stream.buffer.getvalue().decode() for stream in (sys.stdout, sys.stderr)]
        sys.argv, sys.stdout, sys.stderr = kept
    return code, texts[0], texts[1]


def record_command(place: Path, root: Path, *arguments: str) -> dict[str, Any]:
    """What a command line does in the new folder `place`; `root` is left out of the bytes of text files."""
    place.mkdir(parents=True, exist_ok=True)
    with chdir(place):
        code, out, err = titan(*arguments)
    if code in (-1, 3):  # a defect of titan: it is recorded, but must not stay unseen
        print(f"exit code {code}: titan {' '.join(map(str, arguments))}\n{err}", file=sys.stderr)
    found: dict[str, Any] = {"exit": code}
    if out.startswith(("{", "[")):
        content = json.loads(out)
        found["json"] = sorted(set(json_keys(content)))
        if "error" not in content:
            found["numbers"] = {key: value for key, value in content.items() if _NUMBERS.fullmatch(key)}
    return found | {"files": file_digests(place, root)}


def json_keys(content: Any, path: str = "") -> Iterator[str]:
    """Dotted keys of a JSON value, nested ones too; `[]` stands for every element of a list, N for numbers in keys."""
    if isinstance(content, dict):
        for key, value in content.items():
            key = re.sub(r"\b\d+\b", "N", key)  # of layers, stages and ranks
            yield (inner := f"{path}.{key}" if path else key)
            yield from json_keys(value, inner)
    elif isinstance(content, list):
        for value in content:
            yield from json_keys(value, f"{path}[]")


def file_digests(folder: Path, root: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder` by its path.

    In text files the name of `root`, a temporary folder, is replaced and comments are left out.
    """
    return {
        path.relative_to(folder).as_posix(): sha256(_bytes_of(path, root)).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _bytes_of(path: Path, root: Path) -> bytes:
    raw = path.read_bytes()
    if path.suffix in (".yaml", ".toml"):
        raw = _COMMENT.sub(b"", raw)
    return raw.replace(os.fsencode(root), b"ROOT") if path.suffix in (".json", ".yaml", ".toml") else raw
