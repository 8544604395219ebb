"""Llama 3, 3.1, 3.2, 3.3: flavors, parameters, and the names other projects give them."""

from converters.families import llama3_config
from converters.families.base import Family, ModelArgs, Naming, Parameter, RopeScaling
from converters.rules import Drop, RopeHalves, Rule


def ffn_hidden(dim: int, *, multiple_of: int, multiplier: float | None = None) -> int:
    """Meta's feed-forward width: 2/3 of 4·dim, scaled, rounded up to a multiple."""
    hidden = int(2 * 4 * dim / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def _args(dim: int, layers: int, heads: int, kv_heads: int, hidden: int, **rest) -> ModelArgs:
    rest = {"vocab_size": 128256, "rope_scaling": RopeScaling()} | rest
    return ModelArgs(dim, layers, heads, kv_heads, dim // heads, hidden, **rest)


FLAVORS = {
    "debugmodel": _args(256, 6, 16, 16, ffn_hidden(256, multiple_of=256), vocab_size=2048),
    # small on purpose, for parity tests: grouped-query attention, and 3.2's tied embedding with its own scaling
    "debug_gqa": _args(128, 4, 8, 4, 384, vocab_size=2048),
    "debug_tied": _args(128, 4, 8, 4, 384, vocab_size=2048, rope_scaling=RopeScaling(factor=32.0), tied=True),
    "1B": _args(2048, 16, 32, 8, 8192, rope_scaling=RopeScaling(factor=32.0), tied=True),
    "3B": _args(3072, 28, 24, 8, 8192, rope_scaling=RopeScaling(factor=32.0), tied=True),
    "8B": _args(4096, 32, 32, 8, ffn_hidden(4096, multiple_of=1024, multiplier=1.3)),
    "70B": _args(8192, 80, 64, 8, ffn_hidden(8192, multiple_of=4096, multiplier=1.3)),
    "405B": _args(16384, 126, 128, 8, ffn_hidden(16384, multiple_of=4096, multiplier=1.2)),
}


def parameters(args: ModelArgs) -> list[Parameter]:
    """Every parameter in model order with its full shape [out, in] and the dim that tensor parallelism shards."""
    q_rows, kv_rows = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    listed = [Parameter("tok_embeddings.weight", (args.vocab_size, args.dim), 0)]
    for n in range(args.num_layers):
        layer = f"layers.{n}"
        listed += [
            Parameter(f"{layer}.attention.wq.weight", (q_rows, args.dim), 0),
            Parameter(f"{layer}.attention.wk.weight", (kv_rows, args.dim), 0),
            Parameter(f"{layer}.attention.wv.weight", (kv_rows, args.dim), 0),
            Parameter(f"{layer}.attention.wo.weight", (args.dim, q_rows), 1),
            Parameter(f"{layer}.feed_forward.w1.weight", (args.ffn_hidden, args.dim), 0),
            Parameter(f"{layer}.feed_forward.w2.weight", (args.dim, args.ffn_hidden), 1),
            Parameter(f"{layer}.feed_forward.w3.weight", (args.ffn_hidden, args.dim), 0),
            Parameter(f"{layer}.attention_norm.weight", (args.dim,), None),
            Parameter(f"{layer}.ffn_norm.weight", (args.dim,), None),
        ]
    listed.append(Parameter("norm.weight", (args.dim,), None))
    if not args.tied:
        listed.append(Parameter("output.weight", (args.vocab_size, args.dim), 0))
    return listed


_L = "layers.{n}."
_WITHIN_LAYER = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
_FEED_FORWARD = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
_NORMS = ("attention_norm", "ffn_norm")

HF = Naming(
    "hf",
    rules=(
        Rule("tok_embeddings.weight", "model.embed_tokens.weight"),
        Rule(_L + "attention.wq.weight", "model.layers.{n}.self_attn.q_proj.weight", RopeHalves()),
        Rule(_L + "attention.wk.weight", "model.layers.{n}.self_attn.k_proj.weight", RopeHalves()),
        Rule(_L + "attention.wv.weight", "model.layers.{n}.self_attn.v_proj.weight"),
        Rule(_L + "attention.wo.weight", "model.layers.{n}.self_attn.o_proj.weight"),
        Rule(_L + "feed_forward.w1.weight", "model.layers.{n}.mlp.gate_proj.weight"),
        Rule(_L + "feed_forward.w2.weight", "model.layers.{n}.mlp.down_proj.weight"),
        Rule(_L + "feed_forward.w3.weight", "model.layers.{n}.mlp.up_proj.weight"),
        Rule(_L + "attention_norm.weight", "model.layers.{n}.input_layernorm.weight"),
        Rule(_L + "ffn_norm.weight", "model.layers.{n}.post_attention_layernorm.weight"),
        Rule("norm.weight", "model.norm.weight"),
        Rule("output.weight", "lm_head.weight"),
    ),
    drops=(
        Drop("model.layers.{n}.self_attn.rotary_emb.inv_freq", "recomputed from rope_theta; old files carry it"),
        Drop("model.rotary_emb.inv_freq", "recomputed from rope_theta"),
    ),
)

_UNCHANGED = tuple(
    Rule(f"{name}.weight", f"{name}.weight")
    for name in ("tok_embeddings", *(_L + w for w in _WITHIN_LAYER + _FEED_FORWARD + _NORMS), "norm", "output")
)
META = Naming(  # torchtune, too, wants a tied model's output.weight, and drops it
    "meta", rules=_UNCHANGED, drops=(Drop("rope.freqs", "recomputed from rope_theta"),), repeats_tied=True
)

TORCHTUNE = Naming(  # q and k in native row order; a tied model's output.weight must be absent
    "torchtune",
    rules=(
        Rule("tok_embeddings.weight", "tok_embeddings.weight"),
        Rule(_L + "attention.wq.weight", _L + "attn.q_proj.weight"),
        Rule(_L + "attention.wk.weight", _L + "attn.k_proj.weight"),
        Rule(_L + "attention.wv.weight", _L + "attn.v_proj.weight"),
        Rule(_L + "attention.wo.weight", _L + "attn.output_proj.weight"),
        Rule(_L + "feed_forward.w1.weight", _L + "mlp.w1.weight"),
        Rule(_L + "feed_forward.w2.weight", _L + "mlp.w2.weight"),
        Rule(_L + "feed_forward.w3.weight", _L + "mlp.w3.weight"),
        Rule(_L + "attention_norm.weight", _L + "sa_norm.scale"),
        Rule(_L + "ffn_norm.weight", _L + "mlp_norm.scale"),
        Rule("norm.weight", "norm.scale"),
        Rule("output.weight", "output.weight"),
    ),
)
TITAN_MODEL_PREFIX = Naming(  # torchtitan before its TOML-era flat layout
    "titan_model_prefix",
    rules=tuple(Rule(r.native, "model." + r.foreign) for r in _UNCHANGED),
    drops=(Drop("model.freqs_cis", "recomputed from rope_theta"),),
)
TITAN_QKV_LINEAR = Naming(  # torchtitan's newest layout
    "titan_qkv_linear",
    rules=tuple(
        Rule(
            r.native,
            r.foreign.replace("attention.w", "attention.qkv_linear.w")
            if ".wo." not in r.foreign and "attention.w" in r.foreign
            else r.foreign.replace("output.weight", "lm_head.weight"),
        )
        for r in _UNCHANGED
    ),
)

LLAMA3 = Family(
    name="llama3",
    flavors=FLAVORS,
    parameters=parameters,
    namings={n.name: n for n in (HF, META, TORCHTUNE, TITAN_MODEL_PREFIX, TITAN_QKV_LINEAR)},
    args_from_hf_config=llama3_config.args_from_hf_config,
    hf_config=llama3_config.hf_config,
    args_from_meta_params=llama3_config.args_from_meta_params,
    meta_params=llama3_config.meta_params,
    hf_architectures=("LlamaForCausalLM",),
)
