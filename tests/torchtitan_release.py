"""torchtitan v0.2.2: files in the form that its users start from, and modules of the package itself."""

import importlib
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
DEBUG_TOML = """
[job]
dump_folder = "./outputs"
description = "Llama 3 debug training"
print_config = false
[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
[metrics]
log_freq = 1
disable_color_printing = false
enable_wandb = false
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
[optimizer]
name = "AdamW"
lr = 8e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0
[training]
local_batch_size = 8
seq_len = 2048
max_norm = 1.0
steps = 10
dataset = "c4_test"
[parallelism]
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
[checkpoint]
enable = false
interval = 10
last_save_model_only = false
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output"]
[validation]
enable = false
dataset = "c4_validation"
freq = 5
steps = 10
"""


def write_tokenizer(folder: Path, **config) -> Path:
    """A folder in the form of torchtitan's test tokenizer: no merges, begin and end only in tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(value) for value in range(128)] + [f"\\x{value:02x}" for value in range(128, 256)]
    words = ["he", "in", "the", "er", "on", "<|image|>", "<|pad|>"]
    vocab = {token: id for id, token in enumerate([*letters, *words])}
    cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": cut,
        "post_processor": cut,
        "decoder": cut,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    declared = {"128000": {"content": BEGIN} | flags, "128001": {"content": END} | flags}
    output = {"added_tokens_decoder": declared, "bos_token": BEGIN, "eos_token": END, "pad_token": "<|pad|>"}
    output |= {"model_max_length": 131072, "tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(output))
    return folder


def write_first_run(folder: Path) -> Path:
    """What torchtitan's repository has for its debug run: the TOML file, the tokenizer and the sample of C4."""
    write_tokenizer(folder / "tests/assets/tokenizer")
    sample = folder / "tests/assets/c4_test/data.json"
    sample.parent.mkdir(parents=True)
    lines = [{"text": f"The other one is number {n}, in the end. " * 20, "url": "u"} for n in range(300)]
    sample.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "debug_model.toml").write_text(DEBUG_TOML)
    return folder / "debug_model.toml"


@contextmanager
def torchtitan(*names: str):
    """Modules of torchtitan 0.2.2, by their names without `torchtitan.`, without what its packages import.

    Fails where the package is absent: scripts/test_slow.sh installs it.
    """
    folder = Path(os.environ.get("TITAN_TORCHTITAN") or ROOT / ".venv" / "torchtitan")
    if not (folder / "torchtitan-0.2.2.dist-info").is_dir():
        pytest.fail(
            f"no torchtitan 0.2.2 in {folder}; scripts/test_slow.sh installs it:"
            f" pip install --no-deps --target {folder} torchtitan==0.2.2; TITAN_TORCHTITAN names another folder"
        )
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchtitan"}
    for name in before:
        del sys.modules[name]
    try:
        for package in (
            "torchtitan",
            "torchtitan.config",
            "torchtitan.components",
        ):  # their __init__ import tyro, torchao
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = [str(folder / package.replace(".", "/"))]
        job_config = importlib.import_module("torchtitan.config.job_config")
        sys.modules["torchtitan.config"].JobConfig = job_config.JobConfig
        yield [importlib.import_module(f"torchtitan.{name}") for name in names]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
            del sys.modules[name]
        sys.modules.update(before)
