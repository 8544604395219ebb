"""transformers' names and rows as native ones, for every family: spelled out without the tables that are tested."""

from collections.abc import Mapping

_NATIVE = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.": "attention.",  # q_norm, k_norm, sinks
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias",
    "mlp.router.": "moe.router.gate.",
    "mlp.experts.gate_up_proj_bias": "moe.experts.mlp1_bias",
    "mlp.experts.down_proj_bias": "moe.experts.mlp2_bias",
    "mlp.experts": "moe.experts",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "feed_forward.gate_proj": "feed_forward.w1",  # Llama 4's
    "feed_forward.down_proj": "feed_forward.w2",
    "feed_forward.up_proj": "feed_forward.w3",
    "feed_forward.router.": "moe.router.gate.",
    "feed_forward.experts": "moe.experts",
    "feed_forward.shared_expert.gate_proj": "moe.shared_experts.w1",
    "feed_forward.shared_expert.down_proj": "moe.shared_experts.w2",
    "feed_forward.shared_expert.up_proj": "moe.shared_experts.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def native_name(name: str) -> str:
    """For every weight but those of experts, which transformers stacks in another way."""
    for theirs, ours in _NATIVE.items():
        name = name.replace(theirs, ours)
    return name


def native_tensors(tensors: Mapping) -> dict:
    """transformers' tensors in memory by native names; rows keep their order.

    Its experts are one tensor [E, out, in], and [E, in, out] in GPT-OSS and Llama 4; gate and up lie one behind the
    other except in GPT-OSS, where their rows alternate as they do under native names.
    """
    is_gpt_oss = any(name.endswith("gate_up_proj_bias") for name in tensors)
    named = {}
    for name, tensor in tensors.items():
        fqn = native_name(name)
        if fqn.endswith(("experts.gate_up_proj", "experts.down_proj")):
            at, _, last = fqn.rpartition(".")
            tensor = tensor.mT if is_gpt_oss or "feed_forward" in name else tensor
            if is_gpt_oss:
                named[f"{at}.mlp1_weight" if last == "gate_up_proj" else f"{at}.mlp2_weight"] = tensor
            elif last == "gate_up_proj":
                named[f"{at}.w1"], named[f"{at}.w3"] = tensor.chunk(2, dim=1)
            else:
                named[f"{at}.w2"] = tensor
        else:
            named[fqn] = tensor
    return named


def native_arrays(model) -> dict:
    """All weights of a model of transformers in float32, by native names; a bias that its routers lack is zero."""
    import numpy as np

    tensors = native_tensors(getattr(model, "language_model", model).state_dict())
    arrays = {fqn: np.ascontiguousarray(tensor.detach().float().numpy()) for fqn, tensor in tensors.items()}
    for fqn in [fqn for fqn in arrays if fqn.endswith("moe.router.gate.weight")]:
        bias = fqn.replace("router.gate.weight", "expert_bias")
        arrays.setdefault(bias, np.zeros(len(arrays[fqn]), np.float32))
    return arrays


def interleaved(weight, num_heads: int):
    """Rows of a tensor [num_heads * head_dim, …]: the two halves of each head → pairs."""
    rows = weight.shape[0]
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
