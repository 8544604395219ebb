"""Hugging Face folders in fp8, quantized and dequantized by torch alone, as DeepSeek's and DeepGEMM's code does."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CONFIG = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_STAY = ("norm.weight", "embed_tokens.weight", "head.weight", "mlp.gate.weight", "eh_proj.weight", "bias")
E4M3 = torch.float8_e4m3fn


def blocks_of(weight: torch.Tensor, block=(128, 128)) -> torch.Tensor:
    """[rows, row in block, columns, column in block], padded with zeros."""
    rows, columns = (-(-size // n) * n for size, n in zip(weight.shape, block, strict=True))
    padded = torch.zeros(rows, columns, dtype=weight.dtype)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(rows // block[0], block[0], columns // block[1], block[1])


def quantize(weight: torch.Tensor, *, ue8m0=False, block=(128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of DeepGEMM's per_block_cast_to_fp8."""
    view = blocks_of(weight, block)
    amax = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    scales = amax / 448.0
    if ue8m0:
        scales = torch.exp2(scales.double().log2().ceil()).float()
    factors = 1.0 / scales if ue8m0 else 448.0 / amax
    codes = (view * factors).clamp(-448, 448).to(E4M3)
    whole = codes.reshape(view.shape[0] * view.shape[1], -1)[: weight.shape[0], : weight.shape[1]]
    return whole.contiguous(), scales.reshape(view.shape[0], view.shape[2]).contiguous()


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, block=(128, 128), dtype=torch.bfloat16) -> torch.Tensor:
    """float32(code) times the scale of its block, one product, rounded once (weight_dequant of DeepSeek V3)."""
    wide = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (codes.float() * wide[: codes.shape[0], : codes.shape[1]]).to(dtype)


def is_quantized(name: str) -> bool:
    return not name.endswith(_STAY)


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def dequantized(folder: Path, *, block=(128, 128), dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """The values of a folder's weights."""
    held = read_folder(folder)
    values = {name: tensor for name, tensor in held.items() if not name.endswith("_scale_inv")}
    for name in (name for name, tensor in values.items() if tensor.dtype == E4M3):
        values[name] = dequantize(values[name], held[f"{name}_scale_inv"], block=block, dtype=dtype)
    return values


def write_fp8(folder: Path, source: Path, *, ue8m0=False, block=(128, 128), scale_dtype=torch.float32, files=1) -> Path:
    """A quantized copy of a folder of transformers; with two files the scales are not in those of their weights."""
    tensors = {}
    for name, tensor in read_folder(source).items():
        tensors[name] = tensor
        if is_quantized(name):
            codes, scales = quantize(tensor.bfloat16(), ue8m0=ue8m0, block=block)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scales.to(scale_dtype)
    scale_fmt = {"scale_fmt": "ue8m0"} if ue8m0 else {}
    return save(folder, tensors, source, CONFIG | scale_fmt | {"weight_block_size": list(block)}, files=files)


def save(folder: Path, tensors: dict[str, torch.Tensor], source: Path, quantization, *, files=1) -> Path:
    """Write the tensors with the small files of `source`."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors" and "index" not in path.name and path.name != "titan_manifest.json":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    place = {name: names[name.endswith("_scale_inv")] for name in tensors}
    for file in names:
        held = {name: tensor for name, tensor in tensors.items() if place[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
