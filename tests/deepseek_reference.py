"""Tiny random DeepSeek V3 and V2 of transformers, their weights by native names, and the published routing.

Nothing here uses the tables that are tested.
"""

import torch
from torch import Tensor, nn

from converters.families.deepseek_v3 import DeepSeekArgs
from tests.hf_names import native_name

_NAMES = {
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias",
    "mlp.experts.down_proj": "moe.experts.w2",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
}


def their_model(args: DeepSeekArgs) -> nn.Module:
    """`args` of a flavor as transformers builds it: its router decides with a wide margin, its biases are not 0."""
    import transformers

    scaling = args.rope_scaling
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if scaling is not None:
        assert scaling.mscale == scaling.mscale_all_dim
        rope |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    numbers = {
        "hidden_size": args.dim,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": args.num_heads,
        "intermediate_size": args.ffn_hidden,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_seq_len,
        "rope_parameters": rope,
        "q_lora_rank": args.q_rank or None,
        "kv_lora_rank": args.kv_rank,
        "qk_nope_head_dim": args.head_dim - args.rotary_dim,
        "qk_rope_head_dim": args.rotary_dim,
        "v_head_dim": args.value_dim,
        "n_routed_experts": args.num_experts,
        "num_experts_per_tok": args.experts_per_token,
        "moe_intermediate_size": args.expert_hidden,
        "n_shared_experts": args.num_shared_experts,
        "first_k_dense_replace": args.num_dense_layers,
        "n_group": args.num_groups,
        "topk_group": args.top_groups,
        "norm_topk_prob": args.normalize_weights,
        "routed_scaling_factor": args.route_scale,
    }
    if args.score == "sigmoid":
        config, kind = transformers.DeepseekV3Config(**numbers), transformers.DeepseekV3ForCausalLM
    else:
        method = "group_limited_greedy" if args.num_groups > 1 else "greedy"
        config, kind = transformers.DeepseekV2Config(**numbers, topk_method=method), transformers.DeepseekV2ForCausalLM
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0, 1.0 if name.endswith("mlp.gate.weight") else 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.uniform_(-0.3, 0.3)
    return model


def by_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Native name → tensor."""
    named = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):  # [E, 2F, D]
            prefix = native_name(name.removesuffix("mlp.experts.gate_up_proj"))
            named[f"{prefix}moe.experts.w1"], named[f"{prefix}moe.experts.w3"] = tensor.chunk(2, dim=1)
            continue
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        named[native_name(name)] = tensor
    return named


def published_routes(logits_TE: Tensor, bias_E: Tensor, args: DeepSeekArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Ids in ascending order, their weights, and by how much groups and experts were chosen, token by token.

    DeepSeek-V3, arXiv 2412.19437, equations 12 to 16 and section 2.1.2; DeepSeek-V2, arXiv 2405.04434, 2.1.2.
    """
    is_v3, size = args.score == "sigmoid", args.num_experts // args.num_groups
    ids, weights, margins = [], [], []
    for logits_E in logits_TE:
        scores = logits_E.sigmoid() if is_v3 else logits_E.softmax(0)
        choice = (scores + bias_E).tolist()
        groups = [sorted(range(start, start + size), key=lambda e: -choice[e]) for start in range(0, len(choice), size)]
        groups.sort(key=lambda group: -sum(choice[e] for e in group[: 2 if is_v3 else 1]))
        rated = [sum(choice[e] for e in group[: 2 if is_v3 else 1]) for group in groups]
        allowed = sorted((e for group in groups[: args.top_groups] for e in group), key=lambda e: -choice[e])
        chosen = sorted(allowed[: args.experts_per_token])
        last = choice[allowed[args.experts_per_token - 1]]
        margin = last - choice[allowed[args.experts_per_token]]
        if args.top_groups < args.num_groups:
            margin = min(margin, rated[args.top_groups - 1] - rated[args.top_groups])
        margin /= 1 if is_v3 else abs(last)  # softmax's scores are tiny: their logarithms differ by as much
        weight = scores[chosen]
        if args.normalize_weights:
            weight = weight / (weight.sum() + 1e-20)
        ids.append(torch.tensor(chosen))
        weights.append(weight * args.route_scale)
        margins.append(margin)
    return torch.stack(ids), torch.stack(weights), torch.tensor(margins)
