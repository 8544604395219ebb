"""Tiny random Llama 4 of transformers, and its weights by native names.

Nothing here uses the tables that are tested.
"""

import torch
from torch import Tensor, nn

from converters.families.base import RopeScaling
from converters.families.llama4 import Llama4Args
from tests.hf_names import native_name

_NAMES = {
    "feed_forward.router.": "moe.router.gate.",
    "feed_forward.experts.down_proj": "moe.experts.w2",
    "feed_forward.shared_expert.gate_proj": "moe.shared_experts.w1",
    "feed_forward.shared_expert.down_proj": "moe.shared_experts.w2",
    "feed_forward.shared_expert.up_proj": "moe.shared_experts.w3",
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.down_proj": "feed_forward.w2",
    "feed_forward.up_proj": "feed_forward.w3",
}


def their_model(args: Llama4Args, attention: str = "eager") -> nn.Module:
    """`args` as transformers builds it: its router decides with a wide margin. `attention`: also `sdpa`."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": args.rope_theta}
    if isinstance(args.rope_scaling, RopeScaling):
        rope |= {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_max_position_embeddings,
        }
    config = transformers.Llama4TextConfig(
        hidden_size=args.dim,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.expert_hidden,
        intermediate_size_mlp=args.ffn_hidden,
        vocab_size=args.vocab_size,
        rms_norm_eps=args.norm_eps,
        max_position_embeddings=args.max_seq_len,
        rope_parameters=rope,
        moe_layers=list(args.sparse_layers),
        num_local_experts=args.num_experts,
        num_experts_per_tok=args.experts_per_token,
        use_qk_norm=args.norms_qk,
        no_rope_layers=[int(layer not in args.layers_without_positions) for layer in range(args.num_layers)],
        layer_types=[
            "full_attention" if layer in args.layers_without_positions else "chunked_attention"
            for layer in range(args.num_layers)
        ],
        attention_chunk_size=args.chunk,
        attn_temperature_tuning=args.temperature is not None,
        attn_scale=args.temperature or 0.0,
        floor_scale=args.temperature_length,
        pad_token_id=None,
    )
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Llama4ForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0, 1.0 if ".router." in name else 0.1)
    return model


def by_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Native name → tensor. In memory experts of transformers are [E, in, out], gates before up-projections."""
    named = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = native_name(name.removesuffix("feed_forward.experts.gate_up_proj"))
            gate, up = tensor.mT.chunk(2, dim=1)
            named |= {f"{prefix}moe.experts.w1": gate, f"{prefix}moe.experts.w3": up}
            continue
        if name.endswith("experts.down_proj"):
            tensor = tensor.mT
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        named[native_name(name)] = tensor
    return named
