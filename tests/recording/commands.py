"""The recorded command lines: sources, target formats, options, refusals, the other commands.

A source is read under native names and a target is written from them, so that sources and targets are not all crossed;
the commands for one format are `auto` with the source's or the target's format given.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.recording.running import record_command
from tests.recording.sources import BROKEN, SOURCES, model_of, write_sources

NAMED = ("hf-to-dcp", "dcp-to-hf", "meta-to-dcp", "dcp-to-meta", "torch-to-dcp", "dcp-to-torch", "torchtune-to-dcp")
NAMED = (*NAMED, "dcp-to-torchtune")
TARGETS = {  # of `convert auto`: a destination and options
    "dcp": ("out", "--to", "dcp"),
    "dcp for a mesh": ("out", "--to", "dcp", "--for-mesh", "pp=2,dp_shard=3,tp=2"),
    "hf": ("out", "--to", "hf"),
    "meta": ("out", "--to", "meta"),
    "meta 2 shards": ("out", "--to", "meta", "--num-shards", "2"),
    "torch": ("out", "--to", "torch"),
    "torch file": ("out.pt", "--to", "torch"),
    "torchtune": ("out", "--to", "torchtune", "--device", "cpu"),
    "torchtune meta": ("out", "--to", "torchtune", "--style", "meta", "--device", "cpu"),
    "torchtune own": ("out", "--to", "torchtune", "--style", "torchtune", "--device", "cpu"),
}
WRITTEN = {  # by the cases of llama-hf and qwen-hf above: what titan wrote is a source, too
    "llama-titan-dcp": ("auto: llama-hf: dcp", "out"),
    "llama-titan-mesh": ("auto: llama-hf: dcp for a mesh", "out"),
    "llama-titan-torch": ("auto: llama-hf: torch", "out"),
    "llama-titan-file.pt": ("auto: llama-hf: torch file", "out.pt"),
    "llama-titan-meta": ("auto: llama-hf: meta 2 shards", "out"),
    "llama-titan-torchtune": ("auto: llama-hf: torchtune", "out"),
    "llama-titan-torchtune-meta": ("auto: llama-hf: torchtune meta", "out"),
    "llama-titan-torchtune-own": ("auto: llama-hf: torchtune own", "out"),
    "qwen-titan-dcp": ("auto: qwen-hf: dcp", "out"),
    "qwen-titan-torch": ("auto: qwen-hf: torch", "out"),
}
IN_ALL_TARGETS = ("llama-hf", "qwen-hf")
IN_OTHER_TARGETS = {"llama-meta": ("meta", "meta 2 shards"), "llama-titan-torchtune": ("torchtune",)}
OF_NAMED = ("llama-hf", "llama-native.pt", "llama-titan-dcp")
FROM_HF = "../../sources/llama-hf"
FROM_DCP = "../../cases/auto: llama-hf: dcp/out"
MESH = "dp_replicate=2,dp_shard=2,tp=2"
OPTIONS = {
    "dtype bfloat16": ("--dtype", "bfloat16"),
    "dtype float16": ("--dtype", "float16"),
    "mesh": ("--for-mesh", MESH),
    "shard size": ("--shard-size", "20KB"),
    "num shards": ("--num-shards", "2"),
    "style": ("--style", "meta"),
    "device": ("--device", "cuda"),
    "dataset": ("--dataset", "../../sources/chats.jsonl"),
    "dry run": ("--dry-run",),
    "no digest": ("--no-digest",),
    "one worker": ("--workers", "1"),
    "resume": ("--resume",),
    "model from": ("--model-from", "../../sources/llama-hf"),
    "model from another": ("--model-from", "../../sources/qwen-hf"),
    "model from tied": ("--model-from", "../../sources/llama-tied-hf"),
    "allow all": ("--allow-missing", "--allow-extra", "--allow-nonfinite"),
}
WRONG = {  # option with a value that it cannot have → the target that is asked for
    "dtype wrong": ("dcp", "--dtype", "int7"),
    "mesh wrong": ("dcp", "--for-mesh", "dp_shard=x"),
    "mesh unknown axis": ("dcp", "--for-mesh", "tensor=2"),
    "shard size wrong": ("dcp", "--shard-size", "20 apples"),
    "num shards wrong": ("meta", "--num-shards", "3"),
    "style wrong": ("torchtune", "--style", "other"),
    "no worker": ("dcp", "--workers", "0"),
    "model from nowhere": ("dcp", "--model-from", "nowhere"),
    "unknown option": ("dcp", "--frobnicate"),
}
OF_NAMED_COMMANDS = ("dtype bfloat16", "mesh")  # the options' names and types are recorded for all commands
RESHARD = {
    "": (),
    "mesh": ("--for-mesh", MESH),
    "2 files": ("--num-files", "2"),
    "20KB": ("--shard-size", "20KB"),
    "drop": ("--drop", "optimizer,train_state"),
    "drop wrong": ("--drop", "everything"),
    "bfloat16": ("--dtype", "bfloat16", "--drop", "optimizer"),
    "bfloat16 both": ("--dtype", "bfloat16", "--optimizer-dtype", "bfloat16"),
    "dry run": ("--for-mesh", MESH, "--dry-run"),
}
CHECKED_QUICKLY = ("llama-hf", "llama-titan-dcp", "llama-titan-meta", "missing", "not-finite", "cut-off", "empty")
ALLOW = {"": (), "allowed": ("--allow-missing", "--allow-extra", "--allow-nonfinite")}


def command_lines() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, arguments) of every case, in an order in which later ones may read what earlier ones wrote."""
    yield from _pairs()
    yield from _options()
    yield from _refusals()
    yield from _other_commands()


def _source(name: str) -> tuple[str, tuple[str, ...]]:
    """Where a source is as seen from a case's folder, and --model-from where it needs that."""
    if name in WRITTEN:
        case, output = WRITTEN[name]
        place = f"../../cases/{case}/{output}"
    else:
        place = f"../../sources/{name}"
    model = model_of(name)
    return place, (("--model-from", f"../../sources/{model}") if model else ())


def _pairs() -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in (*SOURCES, *WRITTEN):
        place, model_from = _source(name)
        for target, (out, *options) in TARGETS.items():
            if name in IN_ALL_TARGETS or target in ("dcp", "hf", *IN_OTHER_TARGETS.get(name, ())):
                yield f"auto: {name}: {target}", ("convert", "auto", place, out, *options, *model_from, "--json")
        for command in NAMED if name in OF_NAMED else ():
            out = "out.bin" if command == "dcp-to-torch" else "out"
            yield f"{command}: {name}", ("convert", command, place, out, *model_from, "--json")


def _options() -> Iterator[tuple[str, tuple[str, ...]]]:
    for what, options in OPTIONS.items():
        for target in ("dcp", "hf", "torchtune"):
            yield f"option: {what}: {target}", ("convert", "auto", FROM_HF, "out", "--to", target, *options, "--json")
        if what in OF_NAMED_COMMANDS:
            yield f"option: {what}: hf-to-dcp", ("convert", "hf-to-dcp", FROM_HF, "out", *options, "--json")
            for command in ("dcp-to-hf", "dcp-to-meta", "dcp-to-torch", "dcp-to-torchtune"):
                yield f"option: {what}: {command}", ("convert", command, FROM_DCP, "out", *options, "--json")
        yield f"option: {what}: reshard", ("reshard", FROM_DCP, "out", *options, "--json")
    for what, (target, *options) in WRONG.items():
        yield f"option: {what}: {target}", ("convert", "auto", FROM_HF, "out", "--to", target, *options, "--json")
        yield f"option: {what}: reshard", ("reshard", FROM_DCP, "out", *options, "--json")
    yield "option: bf16 source to float32", (
        "convert", "auto", "../../sources/llama-bf16-hf", "out", "--to", "dcp", "--dtype", "float32", "--json"
    )  # fmt: skip


def _refusals() -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in BROKEN:
        for what, options in ALLOW.items():
            arguments = ("convert", "auto", f"../../sources/{name}", "out", "--to", "dcp", *options, "--json")
            yield f"broken: {name}: dcp {what}".strip(), arguments
    convert = ("convert", "auto")
    yield "refused: no arguments", ()
    yield "refused: convert alone", ("convert",)
    yield "refused: no source", convert
    yield "refused: no destination", (*convert, FROM_HF)
    yield "refused: no format", (*convert, FROM_HF, "out")
    yield "refused: unknown format", (*convert, FROM_HF, "out", "--to", "gguf")
    yield "refused: source not there", (*convert, "nowhere", "out", "--to", "dcp")
    yield "refused: source is destination", (*convert, FROM_HF, FROM_HF, "--to", "dcp", "--overwrite")
    yield "refused: destination in source", (*convert, FROM_HF, f"{FROM_HF}/out", "--to", "dcp")
    yield "refused: destination exists", (*convert, FROM_HF, FROM_DCP, "--to", "dcp")
    yield "refused: destination is a file's name", (*convert, FROM_HF, "out.safetensors", "--to", "hf")
    yield "refused: file for dcp", (*convert, FROM_HF, "out.pt", "--to", "dcp")
    yield "refused: no model named", (*convert, "../../sources/llama-native.pt", "out", "--to", "dcp")
    yield "refused: unknown command", ("transmogrify",)
    yield "refused: one file of a series", (
        *convert, "../../sources/llama-hf-3-files/model-00001-of-00003.safetensors", "out", "--to", "dcp"
    )  # fmt: skip
    yield "one file", (*convert, f"{FROM_HF}/model.safetensors", "out", "--to", "dcp", "--json")
    yield "without --json", (*convert, FROM_HF, "out", "--to", "dcp")
    yield "overwrite 1", (*convert, FROM_HF, "../overwrite/out", "--to", "dcp", "--json")
    yield "overwrite 2", (*convert, FROM_HF, "../overwrite/out", "--to", "hf", "--json")
    yield "overwrite 3", (*convert, FROM_HF, "../overwrite/out", "--to", "hf", "--overwrite", "--json")


def _other_commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in (*SOURCES, *WRITTEN, *BROKEN):
        place, model_from = _source(name)
        yield f"inspect: {name}", ("inspect", place, *model_from, "--json")
        yield f"verify: {name}", ("verify", place, *model_from, "--json")
        if name in CHECKED_QUICKLY:
            yield f"verify --quick: {name}", ("verify", place, "--quick", *model_from, "--json")
        yield f"diff: {name}", ("diff", f"../../sources/{name.partition('-')[0]}-hf", place, *model_from, "--json")
    yield "inspect --every", ("inspect", FROM_HF, "--every", "--json")
    yield "diff: flipped", ("diff", FROM_HF, "../../sources/llama-flipped", "--json")
    yield "diff: qwen", ("diff", FROM_HF, "../../sources/qwen-hf", "--json")
    for name in ("llama-stock-dcp", "llama-qkv-dcp", "qwen-stock-dcp", "llama-titan-mesh", "llama-hf"):
        place, model_from = _source(name)
        for what, options in RESHARD.items():
            if name == "llama-stock-dcp" or what in ("", "mesh"):
                yield f"reshard: {name}: {what}", ("reshard", place, "out", *options, *model_from, "--json")
    yield "models", ("models", "--json")
    yield "config show", ("config", "show", "debug", "--json")
    yield "config check", ("config", "check", "llama3_8b", "--world-size", "8", "--json")
    yield "config check wrong", ("config", "check", "llama3_8b", "--training.stepz", "8", "--json")
    yield "config init", ("config", "init", "--json")
    yield "config init debug", ("config", "init", "debug", "mine.toml", "--json")
    yield "config upgrade", ("config", "upgrade", "../../sources/old.toml", "new.toml", "--json")
    yield "config upgrade --check", ("config", "upgrade", "../../sources/old.toml", "--check", "--json")
    small = ("--model.flavor", "debug_gqa", "--json")
    yield "seed", ("seed", "debug", "out", *small)
    yield "seed for a mesh", ("seed", "debug", "out", *small, "--parallelism.data_parallel_shard_degree", "4")
    yield "seed bfloat16", ("seed", "debug", "out", *small, "--training.dtype", "bfloat16", "--debug.seed", "3")
    yield "seed qwen", ("seed", "debug", "out", "--model.name", "qwen3", "--model.flavor", "debug_tied", "--json")
    prepare = ("data", "prepare", "../../sources/text.txt", "--out", "data", "--json")
    yield "data prepare", (*prepare, "--vocab-size", "290")
    yield "data prepare with a tokenizer", (*prepare, "--tokenizer", FROM_HF)
    yield "train --dry-run", ("train", "debug", "--dry-run", "--json", "--model.flavor", "debug_gqa")
    yield "estimate-memory", ("estimate-memory", "llama3_8b", "--world-size", "8", "--gpu", "h100-80", "--json")
    yield "estimate-memory wrong", ("estimate-memory", "llama3_8b", "--gpu", "abacus", "--json")
    yield "version", ("--version",)
    yield "help", ("--help",)


def record_commands(root: Path) -> dict[str, Any]:
    """What every case does, by its name. `as` refers to an earlier case with the same JSON keys, or the same files."""
    os.fsync = lambda descriptor: None  # a busy disk would take most of the time
    write_sources(root / "sources")
    cases: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for name, arguments in command_lines():
        place = root / "cases" / ("overwrite" if name.startswith("overwrite") else name.replace("/", " "))
        case = record_command(place, root, *arguments)
        for part in ("json", "files"):
            if content := case.get(part):
                first = seen.setdefault(f"{part} {content}", name)
                case[part] = content if first == name else f"as {first}"
        cases[name] = case
    return cases
