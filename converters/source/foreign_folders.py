"""Folders of other tools that titan does not read: which tool wrote them, and the command that makes what it reads."""

import re
from collections.abc import Collection

from converters.common.errors import TitanError, UnsupportedError
from converters.common.names import HF_CONFIG
from converters.containers.torch_folder import open_file
from converters.store.base import names_at, open_store, text_at
from converters.store.location import Location

_TORCH_CHECKPOINTING = "metadata.pkl"
_RANK_ITEM = re.compile(r"([A-Za-z0-9_-]+)_(\d+)\.(pt|safetensors)")
_ZERO_RANK = re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt")
_ZERO_3 = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_MP_RANK = re.compile(r"mp_rank_\d+_model_states\.pt")
_ACCELERATE_RANK = re.compile(r"(pytorch_model_fsdp(?:_\d+)?_rank)(\d+)\.bin")
_UNIVERSAL = "zero", "fp32.pt"  # folder of parameters in a universal checkpoint, and the file of one, whole
_VERL_RANK = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")


def foreign_folder(path: Location, names: Collection[str]) -> TitanError | None:
    """The error for a folder that another tool wrote for itself, by the names in it; None for other folders."""
    if _TORCH_CHECKPOINTING in names and any(map(_RANK_ITEM.fullmatch, names)):
        return UnsupportedError(
            f"{path}: written by torch_checkpointing, with one file for each item and rank, which is not supported",
            hint="torch joins the parts in as many processes, to a DCP checkpoint",
            tries=_join(path, [n for n in names if (match := _RANK_ITEM.fullmatch(n)) and match[1] == "model"]),
        )
    step_folder = path.parent if path.name == "zero" else path
    if step := step_folder if _is_deepspeed_step(step_folder) else _deepspeed_step(path, names):
        return _of_deepspeed(step, step.parent)
    if parts := [name for name in names if _ACCELERATE_RANK.fullmatch(name)]:
        return UnsupportedError(
            f"{path}: files of Accelerate with the part of one rank each (use_dcp=False), which are not joined",
            hint="torch joins the parts of FSDP2 in as many processes, to a DCP checkpoint; those of FSDP1 can only be "
            "loaded in a job of as many ranks (`accelerate merge-weights` reads neither)",
            tries=_join(path, parts),
        )
    if ranks := [match for name in names if (match := _VERL_RANK.fullmatch(name))]:
        out = path.with_name(path.name + "-merged")
        return UnsupportedError(
            f"{path}: the parts of {ranks[0][1]} ranks of verl or SkyRL, which are not joined",
            hint="verl's merger writes a Hugging Face folder of them, in bfloat16",
            tries=[f"python -m verl.model_merger merge --backend fsdp --local_dir {path} --target_dir {out}"],
        )
    return None


def _join(folder: Location, names: Collection[str]) -> list[str]:
    """The command with which torch writes the parts of DTensors, `<start><rank>.<suffix>`, as one DCP checkpoint."""
    parts = [match for name in sorted(names) if (match := re.fullmatch(r"(.*?)(\d+)(\.\w+)", name))]
    if not parts or parts[0][3] == ".safetensors":
        return []
    start, _, suffix = parts[0].groups()
    number, out = len({part[2] for part in parts if part[1] == start}), folder.with_name(folder.name + "-joined")
    code = (
        "import torch, torch.distributed as d, torch.distributed.checkpoint as c, torch.distributed.tensor; "
        f"d.init_process_group('gloo'); part = torch.load('{folder / start}%d{suffix}' % d.get_rank(), 'cpu'); "
        f"c.save({{'model': part}}, checkpoint_id='{out}')"
    )
    run = f'torchrun --nproc_per_node {number} --no-python python -c "{code}"'
    return [run, f"{out} --model-from FOLDER"]


def _of_universal(step: Location, model: str) -> TitanError:
    """The error for a universal checkpoint of DeepSpeed: a folder for each parameter, with its weight and moments."""
    folder, out = step / "zero", step.with_name(step.name + ".pt")
    code = (
        f"import torch, pathlib; files = pathlib.Path('{folder}').glob('*/fp32.pt'); "
        f"torch.save({{f.parent.name: torch.load(f)['param'] for f in files}}, '{out}')"
    )
    return UnsupportedError(
        f"{step}: a universal checkpoint of DeepSpeed, with a folder for each parameter, which is not supported",
        hint="torch collects the weights, in 32 bits; moments stay behind",
        tries=[f'python -c "{code}"', f"{out}{model}"],
    )


def _deepspeed_step(path: Location, names: Collection[str]) -> Location | None:
    """The newest step of DeepSpeed in a folder: the one that its file `latest` names, else the one of most steps."""
    steps = [path / name for name in names if re.fullmatch(r"global_step\d+(_universal)?/", name)]
    steps = [step for step in steps if _is_deepspeed_step(step)]
    named = text_at(path / "latest").strip()
    return next(
        (s for s in steps if s.name == named),
        max(steps, key=lambda s: int(re.findall(r"\d+", s.name)[0]), default=None),
    )


def _is_deepspeed_step(step: Location) -> bool:
    of_ranks = (_ZERO_RANK.fullmatch(name) or _MP_RANK.fullmatch(name) for name in names_at(step))
    return any(of_ranks) or _is_universal(step)


def _is_universal(step: Location) -> bool:
    folder, file = _UNIVERSAL
    return any(file in names_at(step / folder / name) for name in names_at(step / folder) if name.endswith("/"))


def _of_deepspeed(step: Location, folder: Location) -> TitanError:
    """`folder`: with zero_to_fp32.py and the file `latest`."""
    names, has_config = names_at(step), HF_CONFIG in names_at(folder)
    model = f" --model-from {folder}" if has_config else " --model-from FOLDER"
    whole = sorted(name for name in names if _MP_RANK.fullmatch(name))
    stage = "ZeRO-3" if any(map(_ZERO_3.fullmatch, names)) else "ZeRO"
    if stage == "ZeRO" and len(whole) == 1 and _opens(step / whole[0]):
        return UnsupportedError(
            f"{step}: a step of DeepSpeed; the optimizer of ZeRO is cut flat, which is not supported",
            hint="the weights in 16 bits are whole in this file; zero_to_fp32.py writes those in 32 bits",
            tries=[f"{step / whole[0]}{model}"],
        )
    if _is_universal(step):
        return _of_universal(step, model)
    script, out = folder / "zero_to_fp32.py", folder.with_name(folder.name + "-fp32")
    return UnsupportedError(
        f"{step}: a step of DeepSpeed: weights and moments of {stage} are cut over ranks, which is not supported",
        hint="DeepSpeed's own script writes the weights as safetensors; then give its output"
        + (", with the config of this folder" if has_config else ""),
        tries=[f"python {script} {folder} {out} --safe_serialization", f"{out}{model}"],
    )


def _opens(path: Location) -> bool:
    try:
        return bool(open_file(*open_store(path)).tensors)
    except TitanError:
        return False
