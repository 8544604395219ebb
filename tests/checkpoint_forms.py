"""One HF folder as every kind of checkpoint that people have, for tests of what reads them all."""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import read_model_info, write_model_info
from tests.doors import convert
from tests.models.names import interleaved, native_name

COMMIT = "c" * 40


@dataclass(frozen=True, slots=True)
class Form:
    """`write(hf, place)` makes one below `place` and returns what a user would name."""

    write: Callable[[Path, Path], Path]
    says_model: bool = True  # else it needs --model-from
    llama_only: bool = False  # Meta's and torchtune's formats have no Qwen 3; RoPE's first context is 8192 there


def write_form(form: Form, hf: Path, place: Path) -> tuple[Path, Path | None]:
    """What a user would name below `place`, and with --model-from where that does not say what model it is.

    Where RoPE's scaling has a first context that the format cannot say, it is written as if that were 8192, and
    titan_model.json is corrected afterwards.
    """
    config = json.loads((hf / "config.json").read_text())
    if not form.llama_only or config["rope_parameters"].get("original_max_position_embeddings", 8192) == 8192:
        return form.write(hf, place), None if form.says_model else hf
    sayable = shutil.copytree(hf, place / "sayable")
    config["rope_parameters"]["original_max_position_embeddings"] = 8192
    (sayable / "config.json").write_text(json.dumps(config))
    written = form.write(sayable, place)
    folder = written if written.is_dir() else written.parent
    (folder / "titan_manifest.json").unlink()
    (folder / "config.json").unlink(missing_ok=True)  # torchtune's, which would contradict it
    write_model_info(folder, read_model_info(hf))
    return written, None


def write_byte_ranks(path: Path) -> None:
    """A tiktoken file of the 256 bytes and no merge: what Meta's and torchtune's code open."""
    path.write_text("".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)))


def _converted(to: str, name: str = "out", **options) -> Callable[[Path, Path], Path]:
    def write(hf: Path, place: Path) -> Path:
        convert(hf, place / name, to=to, options=OutputOptions(**options))
        return place / name

    return write


def _file_in(name: str, write: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    return lambda hf, place: next(write(hf, place).glob(name))


def _for_a_mesh(hf: Path, place: Path) -> Path:
    has_experts = "num_experts_per_tok" in json.loads((hf / "config.json").read_text())
    mesh = MeshShape(pp=2, dp_shard=3, tp=1 if has_experts else 2)
    return _converted("dcp", mesh=mesh)(hf, place)


def _copied(hf: Path, place: Path) -> Path:
    return shutil.copytree(hf, place / "out")


def _repository(hf: Path, place: Path) -> Path:
    """As the hub's client keeps it: models--org--name, refs, snapshots of links, blobs."""
    repository = place / "models--org--tiny"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in hf.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blobs / blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob}")
    return repository


def _snapshot(hf: Path, place: Path) -> Path:
    return _repository(hf, place) / "snapshots" / COMMIT


def _pytorch_model(hf: Path, place: Path, *, num_files: int = 1) -> Path:
    """As transformers wrote weights before safetensors."""
    out = shutil.copytree(hf, place / "out", ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(hf / "model.safetensors")
    if num_files == 1:
        torch.save(weights, out / "pytorch_model.bin")
        return out
    index = {}
    for number in range(num_files):
        name = f"pytorch_model-{number + 1:05d}-of-{num_files:05d}.bin"
        part = dict(list(weights.items())[number::num_files])
        torch.save(part, out / name)
        index |= dict.fromkeys(part, name)
    output = {"metadata": {}, "weight_map": index}
    (out / "pytorch_model.bin.index.json").write_text(json.dumps(output))
    return out


def native(hf: Path) -> dict[str, torch.Tensor]:
    """The weights under native names, spelled out without the tables that are tested."""
    config, out = json.loads((hf / "config.json").read_text()), {}
    heads = {"wq": config["num_attention_heads"], "wk": config["num_key_value_heads"]}
    stacks: dict[tuple[str, str], dict[int, torch.Tensor]] = {}  # (layer, matrix) → expert → its weight
    for theirs, weight in load_file(hf / "model.safetensors").items():
        name = native_name(theirs)
        if inside := re.fullmatch(r"(layers\.\d+)\.moe\.experts\.(\d+)\.(gate|down|up)_proj\.weight", name):
            layer, expert, matrix = inside.groups()
            stacks.setdefault((layer, {"gate": "w1", "down": "w2", "up": "w3"}[matrix]), {})[int(expert)] = weight
            continue
        rotated = heads.get(name.split(".")[-2]) if config["model_type"] == "llama" else None
        out[name] = (interleaved(weight, rotated) if rotated else weight).contiguous()
    for (layer, matrix), experts in stacks.items():
        out[f"{layer}.moe.experts.{matrix}"] = torch.stack([experts[e] for e in range(len(experts))])
        out.setdefault(f"{layer}.moe.expert_bias", torch.zeros(len(experts)))
    return out


def _torchtitan(hf: Path, place: Path, *, layout: str = "flat") -> Path:
    """What torchtitan saves: no word on the model, the optimizer next to it."""
    weights = native(hf)
    if layout == "model. prefix":
        weights = {f"model.{n}": t for n, t in weights.items()} | {"model.freqs_cis": torch.zeros(3)}
    elif layout == "qkv_linear":
        for old in list(weights):
            new = old.replace("output.weight", "lm_head.weight")
            for w in "qkv":
                new = new.replace(f"attention.w{w}", f"attention.qkv_linear.w{w}")
            new = re.sub(r"moe\.experts\.w([13])$", r"moe.routed_experts.inner_experts.w\1_EFD", new)
            new = re.sub(r"moe\.experts\.w2$", "moe.routed_experts.inner_experts.w2_EDF", new)
            new = new.replace("moe.expert_bias", "moe.expert_bias_E")
            weights[new] = weights.pop(old)
    beside = {"optimizer.state.norm.weight.exp_avg": torch.ones(32), "train_state.step": torch.tensor(7)}
    dcp.save(weights | beside, checkpoint_id=str(place / "step-7"), no_dist=True)
    return place / "step-7"


def _nested(hf: Path, place: Path) -> Path:
    """A torch file of a training loop: the weights as transformers names them under "model", an optimizer too."""
    torch.save({"model": load_file(hf / "model.safetensors"), "epoch": 3}, place / "checkpoint.pt")
    return place / "checkpoint.pt"


FORMS = {
    "hf": Form(_copied),
    "hf, sharded": Form(_converted("hf", shard_bytes=40_000)),
    "hf cache, repository": Form(_repository),
    "hf cache, snapshot": Form(_snapshot),
    "hf, its file": Form(_file_in("model.safetensors", _copied)),
    "hf, pytorch_model.bin": Form(_pytorch_model),
    "hf, two .bin": Form(lambda hf, place: _pytorch_model(hf, place, num_files=2)),
    "dcp": Form(_converted("dcp")),
    "dcp for a mesh": Form(_for_a_mesh),
    "torchtitan": Form(_torchtitan, says_model=False),
    "torchtitan, model. prefix": Form(lambda hf, p: _torchtitan(hf, p, layout="model. prefix"), says_model=False),
    "torchtitan, qkv_linear": Form(lambda hf, p: _torchtitan(hf, p, layout="qkv_linear"), says_model=False),
    "torch folder": Form(_converted("torch")),
    "torch .pt": Form(_converted("torch", "out.pt"), says_model=False),
    "torch .pth": Form(_converted("torch", "out.pth"), says_model=False),
    "torch .bin": Form(_converted("torch", "out.bin"), says_model=False),
    "torch, a loop's own": Form(_nested, says_model=False),
    "meta": Form(_converted("meta"), llama_only=True),
    "meta, two shards": Form(_converted("meta", num_shards=2), llama_only=True),
    "meta, its file": Form(_file_in("consolidated.00.pth", _converted("meta")), llama_only=True),
    "torchtune": Form(_converted("torchtune"), llama_only=True),
    "torchtune's meta": Form(_converted("torchtune", style="meta"), llama_only=True),
    "torchtune's own": Form(_converted("torchtune", style="torchtune"), llama_only=True),
}
