"""Tiny random Llama 4 as transformers writes them, multimodal or text; Meta's shards of them; and their formulas."""

import io
import json
from pathlib import Path

import numpy as np

_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_BOTH = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 24,  # of experts
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_local_experts": 12,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
    "floor_scale": 5,
    "attn_scale": 0.3,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
NUMBERS = {  # model → numbers of its text config
    "scout": _BOTH | {"rope_parameters": _SCALED, "use_qk_norm": True, "interleave_moe_layer_step": 1},
    "maverick": _BOTH | {"use_qk_norm": False, "interleave_moe_layer_step": 2},
    # experts as wide as the model, so that their matrices are square
    "square": _BOTH | {"intermediate_size": 64, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2},
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 32,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
PROCESSOR = {"preprocessor_config.json": {"do_resize": True}, "processor_config.json": {"patch_size": 14}}


def make(name: str = "scout", *, multimodal: bool = False, **numbers):
    """A model of transformers; `numbers` are the text config's.

    Every weight is random and large, so that none is like another; the router decides with a wide margin.
    """
    import torch
    from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig

    text = NUMBERS[name] | numbers
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if multimodal:
            model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=VISION)).eval()
        else:
            model = Llama4ForCausalLM(Llama4TextConfig(**text)).eval()
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                is_norm = "norm.weight" in key
                std = 1.0 if ".router." in key else 0.2
                tensor.copy_(torch.randn_like(tensor) * std + is_norm)
    return model


def write(folder: Path, name: str = "scout", *, multimodal: bool = False, dtype: str = "float32", **numbers):
    """Write an HF folder and return its model."""
    import torch

    model = make(name, multimodal=multimodal, **numbers).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    if multimodal:
        for file, content in PROCESSOR.items():
            (folder / file).write_text(json.dumps(content))
    return type(model).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()  # with buffers as they are loaded


def text_state(model) -> dict:
    """The text model's state dict, under the names of the text class."""
    inner = getattr(model, "language_model", model)
    return {name: tensor.detach() for name, tensor in inner.state_dict().items()}


def text_config(model):
    return getattr(model.config, "text_config", model.config)


def meta_shards(model, count: int) -> list[dict]:
    """The files of a Meta release of so many shards, by what transformers' conversion script makes of them.

    What is dropped is another in each rank: statistics, states of kernels, and parts of the vision encoder.
    """
    import torch

    state, config, shards = text_state(model), text_config(model), []
    for rank in range(count):

        def part(name: str, dim: int, rank=rank) -> torch.Tensor:
            return state[name].chunk(count, dim)[rank]

        held = {
            "tok_embeddings.weight": part("model.embed_tokens.weight", 0),
            "norm.weight": state["model.norm.weight"],
            "output.weight": part("lm_head.weight", 0),
            "rope.freqs": torch.ones(4),
        }
        for n in range(config.num_hidden_layers):
            layer, theirs = f"layers.{n}.", f"model.layers.{n}."
            feed, of = f"{layer}feed_forward.", f"{theirs}feed_forward."
            qkv = [part(f"{theirs}self_attn.{name}_proj.weight", 0) for name in "qkv"]
            held[f"{layer}attention.wqkv.weight"] = torch.cat(qkv)
            held[f"{layer}attention.wqkv.layer_norm_weight"] = state[f"{theirs}input_layernorm.weight"]
            held[f"{layer}attention.wqkv._extra_state"] = io.BytesIO(b"state of a kernel")
            held[f"{layer}attention.wo._extra_state"] = torch.full((rank + 1,), rank, dtype=torch.uint8)
            if n == 0:
                held[f"{layer}feed_forward.mlp_shared._extra_state"] = io.BytesIO()
            held[f"{layer}attention.wo.weight"] = part(f"{theirs}self_attn.o_proj.weight", 1)
            norm = state[f"{theirs}post_attention_layernorm.weight"]
            if n not in config.moe_layers:
                held[f"{feed}mlp.layer_norm_weight"] = norm
                held[f"{feed}mlp.fc1_weight"] = torch.cat([part(f"{of}{w}_proj.weight", 0) for w in ("gate", "up")])
                held[f"{feed}mlp.fc2_weight"] = part(f"{of}down_proj.weight", 1)
                continue
            held[f"{feed}norm.weight"] = norm
            gate, up = state[f"{of}experts.gate_up_proj"].chunk(2, dim=-1)
            for name, stack, dim in (
                ("moe_w_in_eD_F", gate, 2),
                ("moe_w_swiglu_eD_F", up, 2),
                ("moe_w_out_eF_D", state[f"{of}experts.down_proj"], 1),
            ):
                held[f"{feed}experts.{name}"] = stack.chunk(count, dim)[rank].flatten(0, 1)
            held[f"{feed}router_DE"] = state[f"{of}router.weight"].T
            held[f"{feed}w_in_shared_FD.weight"] = part(f"{of}shared_expert.gate_proj.weight", 0)
            held[f"{feed}w_swiglu_FD.weight"] = part(f"{of}shared_expert.up_proj.weight", 0)
            held[f"{feed}w_out_shared_DF.weight"] = part(f"{of}shared_expert.down_proj.weight", 1)
            experts = config.num_local_experts
            held[f"{feed}expert_activation_DE"] = torch.full((config.hidden_size, experts), float(rank))
            held[f"{feed}global_gate_stats_3E"] = torch.full((3, experts), float(rank))
            held[f"{feed}running_gate_stats_3E"] = torch.full((3, experts), float(rank))
        held["vision_embeddings.vision_encoder.class_embedding"] = torch.ones(4)
        held["vision_projection.weight"] = torch.full((2, 4), float(rank))
        shards.append(
            {name: value if isinstance(value, io.BytesIO) else value.contiguous() for name, value in held.items()}
        )
    return shards


def write_meta(folder: Path, model, count: int = 1) -> None:
    """A Meta release of `count` shards: consolidated.NN.pth and params.json."""
    import torch

    folder.mkdir()
    for rank, shard in enumerate(meta_shards(model, count)):
        torch.save(shard, folder / f"consolidated.{rank:02}.pth")
    (folder / "params.json").write_text(json.dumps(meta_params(model)))


def meta_params(model) -> dict:
    """params.json, with widths as Meta's formulas (moe.py, model.py) make them of ffn_exp and the multiplier."""
    config = text_config(model)
    dim, scaled = config.hidden_size, config.rope_parameters["rope_type"] != "default"
    return {
        "dim": dim,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": 8,
        "ffn_dim_multiplier": config.intermediate_size_mlp / (8 * dim / 3),
        # 2/3 of ffn_exp · dim, times the multiplier, halved by auto_scale_F
        "ffn_exp": 2 * config.intermediate_size * 4 / config.intermediate_size_mlp,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "use_scaled_rope": scaled,
        "attention_chunk_size": config.attention_chunk_size,
        "nope_layer_interval": 4,
        "use_qk_norm": config.use_qk_norm,
        "attn_temperature_tuning": True,
        "floor_scale": float(config.floor_scale),
        "attn_scale": config.attn_scale,
        "moe_args": {
            "num_experts": config.num_local_experts,
            "top_k": config.num_experts_per_tok,
            "interleave_moe_layer_step": config.interleave_moe_layer_step,
        },
        "vision_args": {"dim": 16},
    }


def native_logits(arrays, tokens, args):
    """The logits of one sequence in float64, by the published formulas, from numbers and native weights."""
    import torch

    w = {name: torch.from_numpy(np.asarray(array, np.float64)) for name, array in arrays.items()}
    x, length = w["tok_embeddings.weight"][tokens], len(tokens)
    positions = torch.arange(length)
    causal = positions[:, None] >= positions
    for n in range(args.num_layers):
        layer = f"layers.{n}."
        h = _norm(x, args.norm_eps) * w[f"{layer}attention_norm.weight"]
        q, k, v = (
            (h @ w[f"{layer}attention.{name}.weight"].T).view(length, -1, args.head_dim).transpose(0, 1)
            for name in ("wq", "wk", "wv")
        )
        mask = causal
        if n in args.layers_without_positions:
            if args.temperature is not None:
                scale = 1 + args.temperature * torch.log1p((positions + 1) // args.temperature_length)
                q = q * scale[:, None]
        else:
            q, k = (_rotated(part, positions, args) for part in (q, k))
            if args.norms_qk:
                q, k = _norm(q, args.norm_eps), _norm(k, args.norm_eps)
            if args.chunk is not None:
                chunk = positions // args.chunk
                mask = causal & (chunk[:, None] == chunk)
        group = args.num_heads // args.num_kv_heads
        k, v = (part.repeat_interleave(group, dim=0) for part in (k, v))
        scores = (q @ k.transpose(1, 2) / args.head_dim**0.5).masked_fill(~mask, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        x = x + mixed @ w[f"{layer}attention.wo.weight"].T
        h = _norm(x, args.norm_eps) * w[f"{layer}ffn_norm.weight"]
        if n not in args.sparse_layers:
            x = x + _swiglu(h, *(w[f"{layer}feed_forward.{name}.weight"] for name in ("w1", "w2", "w3")))
            continue
        out = _swiglu(h, *(w[f"{layer}moe.shared_experts.{name}.weight"] for name in ("w1", "w2", "w3")))
        found, chosen = (h @ w[f"{layer}moe.router.gate.weight"].T).topk(args.experts_per_token)
        for t in range(length):
            for score, e in zip(found[t].sigmoid(), chosen[t], strict=True):
                out[t] += _swiglu(score * h[t], *(w[f"{layer}moe.experts.{name}"][e] for name in ("w1", "w2", "w3")))
        x = x + out
    output = w["tok_embeddings.weight" if args.tied else "output.weight"]
    return (_norm(x, args.norm_eps) * w["norm.weight"]) @ output.T


def _norm(x, eps):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def _swiglu(x, w1, w2, w3):
    gate = x @ w1.T
    return (gate * gate.sigmoid() * (x @ w3.T)) @ w2.T


def _rotated(x, positions, args):
    """Pairs (0, 1), (2, 3), … of the last dim turned by position · frequency."""
    import torch

    frequencies = args.rope_theta ** (-torch.arange(0, args.head_dim, 2, dtype=torch.float64) / args.head_dim)
    if (scaling := args.rope_scaling) is not None:
        wavelengths, original = 2 * torch.pi / frequencies, scaling.original_max_position_embeddings
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        ramp = ((original / wavelengths - low) / (high - low)).clamp(0, 1) if high > low else 0.0 * frequencies
        smooth = (1 - ramp) / scaling.factor + ramp
        smooth = torch.where(wavelengths > original / low, 1 / scaling.factor, smooth)
        frequencies = frequencies * torch.where(wavelengths < original / high, 1.0, smooth)
    turns = torch.polar(torch.ones_like(frequencies), positions[:, None] * frequencies)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)
