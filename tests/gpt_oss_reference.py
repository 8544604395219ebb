"""Tiny random GPT-OSS of transformers, and its weights by native names.

Nothing here uses the tables that are tested.
"""

import torch
from torch import Tensor, nn

from converters.families.base import YarnRope
from converters.families.gpt_oss import GptOssArgs
from tests.hf_names import native_name

_NAMES = {
    "self_attn.sinks": "attention.sinks",
    "mlp.router.": "moe.router.gate.",
    "mlp.experts.gate_up_proj_bias": "moe.experts.mlp1_bias",
    "mlp.experts.down_proj_bias": "moe.experts.mlp2_bias",
    "mlp.experts.gate_up_proj": "moe.experts.mlp1_weight",
    "mlp.experts.down_proj": "moe.experts.mlp2_weight",
}


def their_model(args: GptOssArgs) -> nn.Module:
    """`args` as transformers builds it: its router decides with a wide margin, its biases and sinks are not 0."""
    import transformers

    scaling = args.rope_scaling
    assert isinstance(scaling, YarnRope)
    config = transformers.GptOssConfig(
        hidden_size=args.dim,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.ffn_hidden,
        vocab_size=args.vocab_size,
        rms_norm_eps=args.norm_eps,
        max_position_embeddings=args.max_seq_len,
        sliding_window=args.window,
        layer_types=[
            "sliding_attention" if layer in args.window_layers else "full_attention" for layer in range(args.num_layers)
        ],
        num_local_experts=args.num_experts,
        num_experts_per_tok=args.experts_per_token,
        swiglu_limit=args.clamp,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": args.rope_theta,
            "factor": scaling.factor,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
    )
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GptOssForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0, 1.0 if ".router." in name or "sinks" in name else 0.1)
    return model


def by_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Native name → tensor. In memory experts of transformers are [E, in, out]."""
    named = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensor = tensor.mT
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        named[native_name(name)] = tensor
    return named
