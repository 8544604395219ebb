"""Llama-like decoders: their parameters with roles and shard dims, and the names that other formats give them."""

from collections.abc import Callable

from converters.families.base import EMBEDDING, OUTPUT, ModelArgs, Naming, Parameter, Role
from converters.families.rules import Drop, RopeHalves, Rule


def parameters(args: ModelArgs) -> list[Parameter]:
    """Every parameter in model order with its full shape [out, in], its role and its tensor-parallel dim."""
    return list_parameters(args, layer_parameters)


def list_parameters(args: ModelArgs, layer_parameters: Callable[[str, ModelArgs], list[Parameter]]) -> list[Parameter]:
    """Embedding, layers, last norm and output (unless tied); `layer_parameters` lists those of the layer FQN given."""
    listed = [Parameter(EMBEDDING, (args.vocab_size, args.dim), Role.EMBEDDING, tp_dim=0)]
    for n in range(args.num_layers):
        listed += layer_parameters(f"layers.{n}", args)
    listed.append(Parameter("norm.weight", (args.dim,), Role.NORM))
    if not args.tied:
        listed.append(Parameter(OUTPUT, (args.vocab_size, args.dim), Role.OUTPUT, tp_dim=0))
    return listed


def layer_parameters(layer: str, args: ModelArgs) -> list[Parameter]:
    """The parameters of one dense layer; `layer` is its FQN."""
    return [
        *attention_parameters(layer, args),
        *feed_forward_parameters(layer, args),
        *norm_parameters(layer, args),
    ]


def attention_parameters(layer: str, args: ModelArgs) -> list[Parameter]:
    q_rows, kv_rows = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    weights = [
        column(f"{layer}.attention.wq", q_rows, args.dim),
        column(f"{layer}.attention.wk", kv_rows, args.dim, Role.KV_COLUMN),
        column(f"{layer}.attention.wv", kv_rows, args.dim, Role.KV_COLUMN),
        Parameter(f"{layer}.attention.wo.weight", (args.dim, q_rows), Role.ROW, tp_dim=1),
    ]
    return _interleave_biases(weights, has_bias=args.attention_bias)


def feed_forward_parameters(layer: str, args: ModelArgs) -> list[Parameter]:
    weights = swiglu_parameters(f"{layer}.feed_forward", args.dim, args.ffn_hidden)
    return _interleave_biases(weights, has_bias=args.mlp_bias)


def swiglu_parameters(module: str, dim: int, hidden: int) -> list[Parameter]:
    """The weights of a SwiGLU of `hidden` features inside."""
    return [
        column(f"{module}.w1", hidden, dim),
        Parameter(f"{module}.w2.weight", (dim, hidden), Role.ROW, tp_dim=1),
        column(f"{module}.w3", hidden, dim, Role.UP_COLUMN),
    ]


def norm_parameters(layer: str, args: ModelArgs) -> list[Parameter]:
    names = ("attention_norm", "ffn_norm")
    return [Parameter(f"{layer}.{name}.weight", (args.dim,), Role.NORM) for name in names]


def column(fqn: str, rows: int, columns: int, role: Role = Role.COLUMN) -> Parameter:
    """The weight of a linear layer whose output tensor parallelism shards."""
    return Parameter(f"{fqn}.weight", (rows, columns), role, tp_dim=0, input_group=fqn.rpartition(".")[0])


def _interleave_biases(weights: list[Parameter], *, has_bias: bool) -> list[Parameter]:
    return [p for weight in weights for p in ((weight, weight.bias()) if has_bias else (weight,))]


_L = "layers.{n}."
_WITHIN_LAYER = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
_FEED_FORWARD = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
_NORMS = ("attention_norm", "ffn_norm")


def _with_biases(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """A rule for each linear layer's bias behind those of the weights: the same rows in the same order."""
    has_bias = tuple(f"{_L}{module}.weight" for module in _WITHIN_LAYER + _FEED_FORWARD)
    biases = (
        Rule(r.native.replace(".weight", ".bias"), r.foreign.replace(".weight", ".bias"), r.op)
        for r in rules
        if r.native in has_bias
    )
    return (*rules, *biases)


HF = Naming(
    "hf",
    rules=_with_biases(
        (
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
        )
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
META = Naming(  # without biases, as Meta's code is. torchtune, too, wants a tied model's output.weight, and drops it
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
    rules=tuple(Rule(r.native, "model." + r.foreign) for r in _with_biases(_UNCHANGED)),
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
        for r in _with_biases(_UNCHANGED)
    ),
)

LLAMA_NAMINGS = {n.name: n for n in (HF, META, TORCHTUNE, TITAN_MODEL_PREFIX, TITAN_QKV_LINEAR)}
