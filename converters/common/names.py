"""The names on disk: files, folders, sections of a checkpoint."""

import re

# Files of a checkpoint folder
DCP_METADATA = ".metadata"
MANIFEST = "titan_manifest.json"
MODEL_INFO = "titan_model.json"  # {"family": …, "args": {…}}: which model the weights are of
UNTRANSLATED = "untranslated"  # its key for fields of config.json that titan does not read
ASSETS_FOLDER = "assets"  # tokenizer, chat template, generation config; copied along with the weights
JOURNAL = ".titan_journal"  # which regions of an unfinished output can be trusted

HF_CONFIG = "config.json"
OPENAI_DTYPES = "dtypes.json"  # element types of a gpt-oss release
HF_GENERATION_CONFIG = "generation_config.json"
HF_SINGLE = "model.safetensors"
HF_INDEX = "model.safetensors.index.json"
META_PARAMS = "params.json"
META_SHARD = "consolidated.{index:02d}.pth"
TIKTOKEN_MODEL = "tokenizer.model"
MOONSHOT_RANKS = "tiktoken.model"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
VOCAB_JSON, MERGES = "vocab.json", "merges.txt"
TORCH_MODEL = "model.pt"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"

# What torchtune's recipes start from
TORCHTUNE_RECIPE = "torchtune.yaml"
TORCHTUNE_SPECIAL_TOKENS = "special_tokens.json"
CHAT_LINES, CHAT_LIST = "chat.jsonl", "chat.json"  # one conversation per line, or one JSON list
EDITABLE = (TORCHTUNE_RECIPE, CHAT_LINES, CHAT_LIST)  # for the user to edit: not in the manifest

# Sections of a training checkpoint: everything but the weights, which are flat at the root
OPTIMIZER = "optimizer"
LR_SCHEDULER = "lr_scheduler"
DATALOADER = "dataloader"
TRAIN_STATE = "train_state"
RNG = "rng"
SECTIONS = (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE, RNG)

# Files and folders of a run
METRICS_FILE = "metrics.jsonl"
RESUMED_FROM = "resumed_from"  # key of a record: earlier records of later steps are obsolete
STEP_FOLDER = "step-{step}"
STEP_FOLDER_PATTERN = re.compile(r"^step-(\d+)$")
EPOCH_FOLDER_PATTERN = re.compile(r"^epoch_(\d+)$")  # torchtune's
TEMPORARY_PREFIX = ".tmp-"  # `.tmp-<id>`, a sibling of the final folder; has no step number on purpose
TEXT_INDEXES = "token_indexes"  # in the dump folder: token indexes of the text that the config names
RUN_LOCK = ".titan-lock"  # in a run's checkpoint folder; locked as long as the run lives
ASIDE_PREFIX = ".old-"  # `.old-<name>`: the replaced folder, if the file system cannot exchange two names


def step_of(folder_name: str) -> int | None:
    """The step of a folder named exactly `step-<n>`, else None (`old-step-9-bak` is not a step)."""
    match = STEP_FOLDER_PATTERN.match(folder_name)
    return int(match.group(1)) if match else None


def epoch_of(folder_name: str) -> int | None:
    """The epoch of a folder that torchtune named, `epoch_<n>`, else None."""
    match = EPOCH_FOLDER_PATTERN.match(folder_name)
    return int(match.group(1)) if match else None


def section_of(fqn: str) -> str:
    """The section of an FQN of a training checkpoint; `model` for the weights."""
    head = fqn.split(".", 1)[0]
    return head if head in SECTIONS else "model"
