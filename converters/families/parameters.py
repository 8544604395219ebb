"""The parameters of a decoder, which follow from its blocks, with torchtitan's names."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from converters.families.args import DecoderArgs
from converters.families.blocks import Block, Dense, Ends, Experts, GroupedQuery, Latent, Norm, plain_ends

EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"  # FQNs; a tied output is the embedding
MTP_LAYERS = (
    "mtp_layers."  # the beginning of FQNs of layers for multi-token prediction, which are stored and not computed
)


class Role(Enum):
    """What a parameter is for. Tensor parallelism, inference, initialization and estimates read it, never the name."""

    EMBEDDING = "token embedding, [vocabulary, dim]"
    OUTPUT = "projection to the vocabulary, [vocabulary, dim]"
    NORM = "scale of a norm over the model dim, [dim]"
    HEAD_NORM = "scale of a norm over each head of q or k, [head_dim]"
    SINK = "score of a column of each head's softmax that has no value, [num_heads]"
    COLUMN = "linear layer whose output features are sharded, [out, in]"
    KV_COLUMN = "linear layer that produces the key or value heads, [num_kv_heads * head_dim, in]"
    UP_COLUMN = "column linear layer of a feed-forward whose result the gate multiplies, [hidden, in]"
    ROW = "linear layer whose input features are sharded, so that ranks hold partial sums, [out, in]"
    ROUTER = "linear layer that scores experts, [experts, dim]"
    ROUTER_BIAS = "offset of the experts' scores, which balances them and has no gradient, float32, [experts]"
    EXPERT_COLUMN = "COLUMN of every expert, stacked, [experts, out, in]"
    EXPERT_UP_COLUMN = "UP_COLUMN of every expert, stacked, [experts, out, in]"
    EXPERT_GATE_UP = "COLUMN and UP_COLUMN of every expert, rows in turn, stacked, [experts, 2 * hidden, in]"
    EXPERT_ROW = "ROW of every expert, stacked, [experts, out, in]"
    LATENT = "linear layer whose output all heads share, [latent, in]"
    LATENT_NORM = "scale of a norm over such a latent, [latent]"
    MTP = "projection of a layer for multi-token prediction, which is stored and not computed, [dim, 2 * dim]"


_LINEAR = frozenset((Role.COLUMN, Role.KV_COLUMN, Role.UP_COLUMN, Role.ROW, Role.LATENT, Role.OUTPUT))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the unsharded model; a bias has the role of its layer."""

    fqn: str
    shape: tuple[int, ...]
    role: Role
    tp_dim: int | None = None  # the dim that tensor parallelism shards; None: replicated
    input_group: str = ""  # the module whose input this layer reads, unchanged; layers of one group share it
    is_bias: bool = False
    expert_dim: int | None = None  # the dim that experts are stacked on
    is_trained: bool = True  # False: a buffer, which is saved and has no gradient
    is_offset: bool = False  # of a norm: the factor is 1 + the weight

    @property
    def module(self) -> str:
        """FQN of the module that holds it."""
        return self.fqn.rpartition(".")[0]

    @property
    def unit(self) -> str:
        """FQN of the unit of the model that it belongs to."""
        return unit_of(self.fqn)

    @property
    def layer(self) -> int | None:
        """Number of the decoder's layer that it belongs to."""
        head, _, number = self.unit.partition(".")
        return int(number) if head == "layers" and number else None

    @property
    def depth(self) -> int | None:
        """Number of its block among those of one name: 3 in `layers.3` and in `image_blocks.3`."""
        is_in_block = is_block(self.unit) and not self.unit.startswith(MTP_LAYERS)
        return int(self.unit.partition(".")[2]) if is_in_block else None

    @property
    def is_linear_weight(self) -> bool:
        """Whether it is the matrix of a linear layer."""
        return self.role in _LINEAR and not self.is_bias

    def bias(self) -> "Parameter":
        """The bias of this linear layer: sharded like the weight's rows, whole where the columns are sharded."""
        tp_dim = 0 if self.tp_dim == 0 else None
        return replace(self, fqn=f"{self.module}.bias", shape=self.shape[:1], tp_dim=tp_dim, is_bias=True)


def unit_of(fqn: str) -> str:
    """The unit of a model that a parameter is in: `layers.3` of `layers.3.attention.wq.weight`, else its module."""
    head, _, rest = fqn.partition(".")
    number = rest.partition(".")[0]
    return f"{head}.{number}" if number.isdecimal() else head


def is_block(unit: str) -> bool:
    """Whether a unit is one of several that follow each other, such as `layers.3`."""
    return "." in unit


def units_of(parameters: Sequence[Parameter]) -> list[str]:
    """The units that have parameters, in model order, without layers for multi-token prediction: no model has those."""
    return list(dict.fromkeys(p.unit for p in parameters if not p.unit.startswith(MTP_LAYERS)))


def parameters_of(
    block: Callable[[Any, int], Block], ends: Callable[[Any], Ends] = plain_ends
) -> Callable[[DecoderArgs], list[Parameter]]:
    """`Family.parameters` of a family that has what its blocks say, and nothing else."""

    def parameters(args: DecoderArgs) -> list[Parameter]:
        layers = (layer_parameters(f"layers.{n}", args, block(args, n)) for n in range(args.num_layers))
        return with_ends(args, layers, ends(args))

    return parameters


def with_ends(args: DecoderArgs, layers: Iterable[list[Parameter]], ends: Ends | None = None) -> list[Parameter]:
    """Embedding, the parameters of each layer, last norm and output (unless tied), in model order."""
    ends = ends or plain_ends(args)
    listed = [Parameter(EMBEDDING, (args.vocab_size, args.dim), Role.EMBEDDING, tp_dim=0)]
    for layer in layers:
        listed += layer
    listed += _norm("norm", ends.norm, args.dim)
    if not args.tied:
        listed.append(Parameter(OUTPUT, (args.vocab_size, args.dim), Role.OUTPUT, tp_dim=0))
    return listed


def layer_parameters(layer: str, args: DecoderArgs, block: Block) -> list[Parameter]:
    """The parameters of one layer with full shapes [out, in]; `layer` is its FQN."""
    attention, feed_forward = block.attention, block.feed_forward
    head_norm = attention.qk_norm if isinstance(attention, GroupedQuery) else None
    return [
        *(
            _latent_parameters(f"{layer}.attention", args.dim, attention)
            if isinstance(attention, Latent)
            else _grouped_query_parameters(f"{layer}.attention", args, attention)
        ),
        *(
            expert_parameters(f"{layer}.moe", args.dim, feed_forward)
            if isinstance(feed_forward, Experts)
            else dense_parameters(f"{layer}.feed_forward", args.dim, feed_forward)
        ),
        *_norm(f"{layer}.attention_norm", block.before, args.dim),
        *_norm(f"{layer}.ffn_norm", None if block.parallel else block.before, args.dim),
        *_norm(f"{layer}.attention_post_norm", block.after, args.dim),
        *_norm(f"{layer}.ffn_post_norm", block.after, args.dim),
        *_norm(f"{layer}.attention.q_norm", head_norm, args.head_dim, Role.HEAD_NORM),
        *_norm(f"{layer}.attention.k_norm", head_norm, args.head_dim, Role.HEAD_NORM),
    ]


def _norm(fqn: str, norm: Norm | None, size: int, role: Role = Role.NORM) -> list[Parameter]:
    if norm is None or not norm.has_weight:
        return []
    return [Parameter(f"{fqn}.weight", (size,), role, is_offset=norm.plus_one)]


def _grouped_query_parameters(module: str, args: DecoderArgs, attention: GroupedQuery) -> list[Parameter]:
    q_rows, kv_rows = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    inputs = [
        column(f"{module}.wq", q_rows, args.dim),
        column(f"{module}.wk", kv_rows, args.dim, Role.KV_COLUMN),
        column(f"{module}.wv", kv_rows, args.dim, Role.KV_COLUMN),
    ]
    output = Parameter(f"{module}.wo.weight", (args.dim, q_rows), Role.ROW, tp_dim=1)
    sinks = Parameter(f"{module}.sinks", (args.num_heads,), Role.SINK, tp_dim=0)
    return [
        *_interleave_biases(inputs, has_bias=attention.qkv_bias),
        *_interleave_biases([output], has_bias=attention.out_bias),
        *([sinks] if attention.has_sinks else ()),
    ]


def _latent_parameters(module: str, dim: int, attention: Latent) -> list[Parameter]:
    q_rows = attention.num_heads * (attention.plain_dim + attention.rotary_dim)
    kv_rows = attention.num_heads * (attention.plain_dim + attention.value_dim)
    queries = [column(f"{module}.wq", q_rows, dim)]
    if attention.q_rank:
        queries = [
            _latent(f"{module}.wq_a", attention.q_rank, dim),
            *_norm(f"{module}.q_norm", attention.norm, attention.q_rank, Role.LATENT_NORM),
            Parameter(f"{module}.wq_b.weight", (q_rows, attention.q_rank), Role.COLUMN, tp_dim=0),
        ]
    return [
        *queries,
        _latent(f"{module}.wkv_a", attention.kv_rank + attention.rotary_dim, dim),
        *_norm(f"{module}.kv_norm", attention.norm, attention.kv_rank, Role.LATENT_NORM),
        Parameter(f"{module}.wkv_b.weight", (kv_rows, attention.kv_rank), Role.COLUMN, tp_dim=0),
        Parameter(f"{module}.wo.weight", (dim, attention.num_heads * attention.value_dim), Role.ROW, tp_dim=1),
    ]


def _latent(fqn: str, rows: int, columns: int) -> Parameter:
    return Parameter(f"{fqn}.weight", (rows, columns), Role.LATENT, input_group=fqn.rpartition(".")[0])


def dense_parameters(module: str, dim: int, dense: Dense) -> list[Parameter]:
    """The parameters of a dense feed-forward; `module` is its FQN."""
    weights = [
        column(f"{module}.w1", dense.hidden, dim),
        Parameter(f"{module}.w2.weight", (dim, dense.hidden), Role.ROW, tp_dim=1),
        column(f"{module}.w3", dense.hidden, dim, Role.UP_COLUMN),
    ]
    return _interleave_biases(weights, has_bias=dense.has_biases)


def expert_parameters(moe: str, dim: int, experts: Experts) -> list[Parameter]:
    """The router, the stacked experts and the shared one of a mixture of experts; `moe` is its FQN."""
    num, hidden = experts.num, experts.hidden
    gate = Parameter(f"{moe}.router.gate.weight", (num, dim), Role.ROUTER)
    second = Parameter(f"{moe}.experts.w2", (num, dim, hidden), Role.EXPERT_ROW, tp_dim=2, expert_dim=0)
    if experts.fused_rows:
        shape = (num, 2 * hidden, dim)
        stacked = [
            Parameter(f"{moe}.experts.mlp1_weight", shape, Role.EXPERT_GATE_UP, tp_dim=1, expert_dim=0),
            replace(second, fqn=f"{moe}.experts.mlp2_weight"),
        ]
    else:
        first = Parameter(f"{moe}.experts.w1", (num, hidden, dim), Role.EXPERT_COLUMN, tp_dim=1, expert_dim=0)
        stacked = [first, second, replace(first, fqn=f"{moe}.experts.w3", role=Role.EXPERT_UP_COLUMN)]
    shared = Dense(experts.shared_hidden)
    return [
        Parameter(f"{moe}.expert_bias", (num,), Role.ROUTER_BIAS, is_trained=False),
        *_interleave_biases([gate], has_bias=experts.has_biases),
        *(
            each
            for weight in stacked
            for each in ((weight, _stacked_bias(weight)) if experts.has_biases else (weight,))
        ),
        *(dense_parameters(f"{moe}.shared_experts", dim, shared) if shared.hidden else ()),
    ]


def _stacked_bias(weight: Parameter) -> Parameter:
    """The biases of stacked experts: sharded like the weights' rows, whole where their columns are sharded."""
    fqn, tp_dim = weight.fqn.replace("_weight", "_bias"), 1 if weight.tp_dim == 1 else None
    return replace(weight, fqn=fqn, shape=weight.shape[:2], tp_dim=tp_dim, is_bias=True)


def column(fqn: str, rows: int, columns: int, role: Role = Role.COLUMN) -> Parameter:
    """The weight of a linear layer whose output tensor parallelism shards."""
    return Parameter(f"{fqn}.weight", (rows, columns), role, tp_dim=0, input_group=fqn.rpartition(".")[0])


def _interleave_biases(weights: Iterable[Parameter], *, has_bias: bool) -> list[Parameter]:
    return [p for weight in weights for p in ((weight, weight.bias()) if has_bias else (weight,))]
