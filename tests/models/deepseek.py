"""Tiny random DeepSeek V3 and V2 as transformers itself writes them, and their formulas."""

from pathlib import Path

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_BOTH = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,  # of the dense layer
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_routed_experts": 12,  # "10" could sort before "2"
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 64,
    "rope_parameters": _YARN,
    "attn_implementation": "eager",
}
NUMBERS = {  # model → numbers of its config
    "v3": _BOTH | {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_mtp_layers": 0},
    "v2": _BOTH | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    "v2_lite": _BOTH | {"q_lora_rank": None, "n_group": None, "topk_group": None},
    # without groups and with a q that is made of the input: Moonlight; a theta and a scale of Kimi's
    "moonlight": _BOTH
    | {"n_shared_experts": 2, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "num_mtp_layers": 0, "rms_norm_eps": 1e-5},
    "kimi": _BOTH
    | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "num_mtp_layers": 0}
    | {"rope_parameters": _YARN | {"rope_theta": 50000.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
}


def write(folder: Path, name: str = "v3", *, dtype: str = "float32", std: float = 0.2, **numbers):
    """Write an HF folder and return its model; `numbers` are the config's, `std` its matrices'.

    Every weight is random and large, so that none is like another; the router decides with a wide margin.
    """
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    v2 = name.startswith("v2")
    config = (DeepseekV2Config if v2 else DeepseekV3Config)(**NUMBERS[name] | numbers)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (DeepseekV2ForCausalLM if v2 else DeepseekV3ForCausalLM)(config).eval()
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                is_norm = tensor.ndim == 1 and "correction" not in key
                size = 0.2 if is_norm else 1.0 if ".mlp.gate." in key else std
                tensor.copy_(torch.randn_like(tensor) * size + is_norm)
    biases = {key: tensor.clone() for key, tensor in model.state_dict().items() if "correction" in key}
    model.to(getattr(torch, dtype))
    for key, bias in biases.items():  # stays float32, as in the published files
        model.get_submodule(key.rpartition(".")[0]).e_score_correction_bias = bias
    model.save_pretrained(folder)
    return model


def native_logits(weights, tokens, args):
    """Logits [L, V] of `tokens` [L] from weights under native names, in float64; `args`: of a DeepSeek.

    From the papers (arXiv 2405.04434, 2412.19437) and YaRN's (2309.00071), without a line of the packages under test.
    """
    import torch
    from torch.nn.functional import embedding, linear, silu

    weights = {fqn: torch.as_tensor(tensor).double() for fqn, tensor in weights.items()}
    plain, rotary = args.head_dim - args.rotary_dim, args.rotary_dim
    angles, amplitude, scale = _rope(args, len(tokens))
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude

    def norm(x, name, eps=args.norm_eps):
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weights[f"{name}.weight"]

    def turn(x):  # [..., L, rotary], pairs (2i, 2i + 1)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    def swiglu(x, w1, w2, w3):
        return linear(silu(linear(x, w1)) * linear(x, w3), w2)

    def attention(x, at):
        if args.q_rank:
            q = linear(
                norm(linear(x, weights[f"{at}.wq_a.weight"]), f"{at}.q_norm", 1e-6), weights[f"{at}.wq_b.weight"]
            )
        else:
            q = linear(x, weights[f"{at}.wq.weight"])
        q = q.unflatten(-1, (args.num_heads, args.head_dim)).transpose(0, 1)
        latent, k_rotary = linear(x, weights[f"{at}.wkv_a.weight"]).split((args.kv_rank, rotary), -1)
        made = linear(norm(latent, f"{at}.kv_norm", 1e-6), weights[f"{at}.wkv_b.weight"])
        k, v = made.unflatten(-1, (args.num_heads, -1)).transpose(0, 1).split((plain, args.value_dim), -1)
        scores = q[..., :plain] @ k.mT + turn(q[..., plain:]) @ turn(k_rotary).T
        later = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        scores = (scores * scale).masked_fill(later, float("-inf")).softmax(-1)
        return linear((scores @ v).transpose(0, 1).flatten(-2), weights[f"{at}.wo.weight"])

    def experts(x, at):
        logits = linear(x, weights[f"{at}.router.gate.weight"])
        is_v3 = args.score == "sigmoid"
        scores = logits.sigmoid() if is_v3 else logits.softmax(-1)
        choice = scores + weights[f"{at}.expert_bias"]
        grouped = choice.unflatten(-1, (args.num_groups, -1))
        rated = grouped.topk(2, -1).values.sum(-1) if is_v3 and args.num_groups > 1 else grouped.amax(-1)
        kept = torch.zeros_like(rated).scatter(1, rated.topk(args.top_groups, -1).indices, 1).bool()
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        ids = choice.topk(args.experts_per_token, -1).indices
        factors = scores.gather(1, ids)
        if args.normalize_weights:
            factors = factors / factors.sum(-1, keepdim=True)
        out = swiglu(x, *(weights[f"{at}.shared_experts.{w}.weight"] for w in ("w1", "w2", "w3")))
        for token, (chosen, of) in enumerate(zip(ids.tolist(), factors * args.route_scale, strict=True)):
            for e, factor in zip(chosen, of, strict=True):
                out[token] += factor * swiglu(x[token], *(weights[f"{at}.experts.{w}"][e] for w in ("w1", "w2", "w3")))
        return out

    x = embedding(tokens, weights["tok_embeddings.weight"])
    for n in range(args.num_layers):
        at = f"layers.{n}"
        x = x + attention(norm(x, f"{at}.attention_norm"), f"{at}.attention")
        h = norm(x, f"{at}.ffn_norm")
        if n < args.num_dense_layers:
            x = x + swiglu(h, *(weights[f"{at}.feed_forward.{w}.weight"] for w in ("w1", "w2", "w3")))
        else:
            x = x + experts(h, f"{at}.moe")
    return linear(norm(x, "norm"), weights.get("output.weight", weights["tok_embeddings.weight"]))


def _rope(args, length):
    """Angles [L, rotary / 2], the amplitude of cosine and sine, and the scale of attention's scores."""
    import math

    import torch

    pairs, scaling = args.rotary_dim // 2, args.rope_scaling
    frequencies = args.rope_theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    scale, amplitude = args.head_dim**-0.5, 1.0
    if scaling is not None:

        def pair_of(turns):  # which pair turns so often within the original length
            circle = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
            return pairs * math.log(circle) / math.log(args.rope_theta)

        def magnitude(factor):
            return 1.0 if scaling.factor <= 1 else 0.1 * factor * math.log(scaling.factor) + 1.0

        low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, args.rotary_dim - 1)
        high += 0.001 if low == high else 0
        ramp = ((torch.arange(pairs, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (ramp / scaling.factor + (1 - ramp))
        if scaling.attention_factor is not None:
            amplitude = scaling.attention_factor
        elif scaling.mscale and scaling.mscale_all_dim:
            amplitude = magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
        else:
            amplitude = magnitude(1)
        if scaling.mscale_all_dim:
            scale *= magnitude(scaling.mscale_all_dim) ** 2
    return torch.outer(torch.arange(length, dtype=torch.float64), frequencies), amplitude, scale


def write_mtp(folder: Path, *, count: int = 1, **numbers):
    """Write a V3 with layers for multi-token prediction as DeepSeek publishes them; return model and tensors."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    layers = numbers.get("num_hidden_layers", NUMBERS["v3"]["num_hidden_layers"])
    write(folder, **numbers | {"num_hidden_layers": layers + count})  # whose last layers are taken
    extra = {n: t for n, t in load_file(folder / "model.safetensors").items() if _layer_of(n) >= layers}
    model = write(folder, num_mtp_layers=count, **numbers)
    tensors = load_file(folder / "model.safetensors") | extra
    generator = torch.Generator().manual_seed(3)
    for k in range(count):
        at, dim = f"model.layers.{layers + k}.", model.config.hidden_size
        for name, shape in {
            "enorm": (dim,),
            "hnorm": (dim,),
            "shared_head.norm": (dim,),
            "eh_proj": (dim, 2 * dim),
        }.items():
            tensors[f"{at}{name}.weight"] = torch.randn(shape, generator=generator)
        tensors[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == count
    return model, tensors


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1
