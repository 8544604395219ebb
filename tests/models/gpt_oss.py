"""Tiny random GPT-OSS models as transformers writes them, and folders in mxfp4 as they are published."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.fp8_folders import read_folder

NUMBERS = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_local_experts": 12,  # "10" could sort before "2"
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    "attn_implementation": "eager",
}
STAYS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": STAYS}
TABLE = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def make(**numbers):
    """A model of transformers. Every weight is random and large; the router decides with a margin."""
    from transformers import GptOssConfig, GptOssForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GptOssForCausalLM(GptOssConfig(**NUMBERS | numbers)).eval()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                std = 1.0 if ".router." in name or "sinks" in name else 0.2
                tensor.copy_(torch.randn_like(tensor) * std + ("norm" in name))
    return model


def write(folder: Path, *, dtype: str = "bfloat16", **numbers):
    """Write an HF folder and return its model."""
    model = make(**numbers)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return model


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., rows, 32 · n] in bfloat16 of [..., rows, n, 16] and [..., rows, n]: the table times 2^(scale - 127)."""
    pairs = torch.stack([TABLE[(blocks & 15).long()], TABLE[(blocks >> 4).long()]], -1).flatten(-2)
    return (pairs.double() * torch.exp2(scales.double() - 127)[..., None]).bfloat16().flatten(-2)


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales by the rule of the releases: 2^⌈log2(amax / 6)⌉ of bfloat16 values, ties to even codes."""
    groups = values.bfloat16().double().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1)
    exponent = torch.where(amax > 0, torch.log2(amax / 6).ceil(), -127.0).clamp(min=-127.0)
    scaled = groups / torch.exp2(exponent)[..., None]
    distance = (scaled.abs()[..., None] - TABLE[:8].double()).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even = torch.tensor([0, 1] * 4)
    codes = torch.where(nearest, even * 8 + torch.arange(8), 99).amin(-1) % 8  # of two nearest ones the even one
    codes = codes + 8 * torch.signbit(scaled)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponent + 127).to(torch.uint8)


def write_mxfp4(folder: Path, source: Path) -> dict[str, torch.Tensor]:
    """A copy of a folder of transformers with random codes and scales as published; returns its values in HF names."""
    tensors, values = {}, {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in read_folder(source).items():
        tensors[name] = values[name] = tensor
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        del tensors[name]
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        values[name] = dequantize(blocks, scales).mT.contiguous()
    save(folder, tensors, source, CONFIG)
    return values


def save(folder: Path, tensors: dict[str, torch.Tensor], source: Path, quantization, *, config=None) -> Path:
    """Write tensors with the small files of `source`."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "titan_manifest.json":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text()) if config is None else config
    config.pop("quantization_config", None)
    config |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def native_logits(weights, tokens, args):
    """Logits [L, V] of `tokens` [L] from weights under native names, in float64; `args`: of a GPT-OSS.

    From the model card (arXiv 2508.10925) and OpenAI's description of its experts; frequencies are titan's own, which
    other tests compare with transformers'.
    """
    from torch.nn.functional import embedding, linear

    from converters.families.blocks import rope_of
    from trainer.models.rope import rope_frequencies, rotation_scale

    held = {fqn: torch.as_tensor(tensor).double() for fqn, tensor in weights.items()}
    angles = torch.arange(len(tokens))[:, None].float() * rope_frequencies(rope_of(args, pairs=False))
    cos, sin = (f(angles).double() * rotation_scale(args.rope_scaling) for f in (torch.cos, torch.sin))
    far = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))

    def norm(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + args.norm_eps).rsqrt() * held[f"{name}.weight"]

    def project(x, name):
        return linear(x, held[f"{name}.weight"], held.get(f"{name}.bias"))

    def heads(x, count):
        return x.unflatten(-1, (count, args.head_dim)).transpose(0, 1)

    def turn(x):  # halves
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(x, at, window):
        q = turn(heads(project(x, f"{at}.wq"), args.num_heads))
        k, v = (heads(project(x, f"{at}.{name}"), args.num_kv_heads) for name in ("wk", "wv"))
        shared = args.num_heads // args.num_kv_heads
        k, v = turn(k).repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        hidden = (far < 0) | (far >= window) if window else far < 0
        scores = (q @ k.mT * args.head_dim**-0.5).masked_fill(hidden, float("-inf"))
        sinks = held[f"{at}.sinks"][:, None, None].expand(-1, len(tokens), 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return project((shares @ v).transpose(0, 1).flatten(-2), f"{at}.wo")

    def experts(x, at):
        chosen = project(x, f"{at}.router.gate").topk(args.experts_per_token, -1)
        first, second = ([held[f"{at}.experts.mlp{n}_{kind}"] for kind in ("weight", "bias")] for n in (1, 2))
        out = torch.zeros_like(x)
        for token, (ids, shares) in enumerate(zip(chosen.indices, chosen.values.softmax(-1), strict=True)):
            for e, share in zip(ids, shares, strict=True):
                both = linear(x[token], first[0][e], first[1][e])
                gate, up = both[0::2].clamp(max=args.clamp), both[1::2].clamp(-args.clamp, args.clamp)
                inside = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                out[token] += share * linear(inside, second[0][e], second[1][e])
        return out

    x = embedding(tokens, held["tok_embeddings.weight"])
    for n in range(args.num_layers):
        at = f"layers.{n}"
        window = args.window if n in args.window_layers else None
        x = x + attention(norm(x, f"{at}.attention_norm"), f"{at}.attention", window)
        x = x + experts(norm(x, f"{at}.ffn_norm"), f"{at}.moe")
    return linear(norm(x, "norm"), held.get("output.weight", held["tok_embeddings.weight"]))
