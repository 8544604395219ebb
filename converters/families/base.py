"""What a model family declares, without torch: numbers, parameters and their roles, names, shard dims."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from math import log, prod
from typing import TYPE_CHECKING, Any, Literal

from converters.families.rules import Drop, Rule

if TYPE_CHECKING:
    from converters.common.box import TensorInfo

EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"  # FQNs; a tied output is the embedding
MTP_LAYERS = (
    "mtp_layers."  # the beginning of FQNs of layers for multi-token prediction, which are stored and not computed
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a number of a model may be: of a `kind`, from `low` to `high`; a tuple is a list of layers."""

    kind: type
    low: float = 0
    high: float = 0


SIZE = Limits(int, 1, 2**31 - 1)
LENGTH = Limits(int, 1, 2**53)  # in tokens
FLAG = Limits(bool)
LAYERS = Limits(tuple)
FACTOR = Limits(float, 1e-6, 1e9)


def limited(limits: Limits, *names: str) -> dict[str, Any]:
    """Metadata of a field: the limits of a number, and its names in config.json, params.json and the like."""
    return {"limits": limits, "names": names}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's frequency scaling (`rope_type: llama3`); lengths in tokens."""

    factor: float = field(default=8.0, metadata=limited(FACTOR))
    low_freq_factor: float = field(default=1.0, metadata=limited(FACTOR))
    high_freq_factor: float = field(default=4.0, metadata=limited(FACTOR))
    original_max_position_embeddings: int = field(default=8192, metadata=limited(LENGTH))


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Every frequency divided by `factor`."""

    rope_type: str = field(default="linear", init=False)
    factor: float = field(metadata=limited(FACTOR))


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """Dynamic NTK: plain RoPE within `max_seq_len`, another theta for longer sequences, which are not covered."""

    rope_type: str = field(default="dynamic", init=False)
    factor: float = field(metadata=limited(FACTOR))


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (arXiv 2309.00071) with the names and defaults of transformers; the length in tokens.

    attention_factor None: computed from factor, mscale and mscale_all_dim.
    """

    rope_type: str = field(default="yarn", init=False)
    factor: float = field(metadata=limited(FACTOR))
    original_max_position_embeddings: int = field(metadata=limited(LENGTH))
    beta_fast: float = field(default=32.0, metadata=limited(Limits(float, 0, 1e9)))
    beta_slow: float = field(default=1.0, metadata=limited(Limits(float, 0, 1e9)))
    truncate: bool = field(default=True, metadata=limited(FLAG))
    attention_factor: float | None = field(default=None, metadata=limited(Limits(float, 0, 1e9)))
    mscale: float | None = field(default=None, metadata=limited(Limits(float, -1e9, 1e9)))
    mscale_all_dim: float | None = field(default=None, metadata=limited(Limits(float, -1e9, 1e9)))


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Equation 22 of YaRN, with the weight that DeepSeek has added."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


Scaling = RopeScaling | LinearRope | DynamicRope | YarnRope
SCALINGS: Mapping[str, type[Scaling]] = {
    "llama3": RopeScaling,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "yarn": YarnRope,
}


def rope_type(scaling: Scaling | None) -> str:
    """Name of a scaling in transformers."""
    if scaling is None:
        return "default"
    return next(name for name, kind in SCALINGS.items() if isinstance(scaling, kind))


def describe_rope(scaling: Scaling) -> str:
    """The scaling in a message: `RoPE of type llama3 (factor 8, low_freq_factor 1, …)`, without what is not set."""
    numbers = [f"{key} {value:.10g}" for key, value in asdict(scaling).items() if isinstance(value, int | float)]
    return f"RoPE of type {rope_type(scaling)} ({', '.join(numbers)})"


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The numbers of a Llama-like decoder. Serialized as `args` in titan_model.json."""

    dim: int = field(metadata=limited(SIZE, "hidden_size"))
    num_layers: int = field(metadata=limited(Limits(int, 1, 10_000), "num_hidden_layers", "n_layers"))
    num_heads: int = field(metadata=limited(SIZE, "num_attention_heads", "n_heads"))
    num_kv_heads: int = field(metadata=limited(SIZE, "num_key_value_heads", "n_kv_heads"))
    head_dim: int = field(metadata=limited(SIZE))
    ffn_hidden: int = field(metadata=limited(SIZE, "intermediate_size"))
    vocab_size: int = field(metadata=limited(SIZE))
    norm_eps: float = field(default=1e-5, metadata=limited(Limits(float, 0, 1), "rms_norm_eps"))
    rope_theta: float = field(default=500000.0, metadata=limited(Limits(float, 1, 1e15)))
    rope_scaling: Scaling | None = None
    max_seq_len: int = field(default=131072, metadata=limited(LENGTH, "max_position_embeddings"))
    tied: bool = field(default=False, metadata=limited(FLAG, "tie_word_embeddings"))  # to the embedding
    attention_bias: bool = field(default=False, metadata=limited(FLAG))  # wq, wk, wv and wo have one
    mlp_bias: bool = field(default=False, metadata=limited(FLAG))  # w1, w2 and w3 have one


# titan_model.json lists these numbers of one family for every family, after `tied`, with this value where the family's
# args have no such number: the file's bytes do not change.
LISTED_FOR_EVERY_FAMILY: Mapping[str, Any] = {"qk_norm": False}
_OMITTED_AT_DEFAULT = ("attention_bias", "mlp_bias")  # added later: files of models without them stay as they were
OMITTED_AT_DEFAULT = {"omitted": True}  # metadata of such a field of a family's own args
ONLY_FOR_TRAINING = OMITTED_AT_DEFAULT | {"only for training": True}  # which no file but titan's states
BALANCE_RATE = ONLY_FOR_TRAINING | limited(Limits(float, 0, 1))  # see Experts
NUM_EXPERTS = Limits(int, 1, 65_536)


def all_numbers(args: ModelArgs) -> dict[str, Any]:
    """Every number, those that are listed for every family included, for comparing models of two families."""
    listed: dict[str, Any] = {}
    for name, value in asdict(args).items():
        listed[name] = value
        if name == "tied":
            listed |= LISTED_FOR_EVERY_FAMILY
    return listed


def computed_numbers(args: ModelArgs) -> dict[str, Any]:
    """`all_numbers` without those that change training, but not what the model computes."""
    others = {f.name for f in fields(args) if f.metadata.get("only for training")}
    return {name: value for name, value in all_numbers(args).items() if name not in others}


def defining_numbers(args: ModelArgs) -> dict[str, Any]:
    """`computed_numbers` without max_seq_len, which only says how far a model may look, except to a dynamic RoPE."""
    numbers = computed_numbers(args)
    if not isinstance(args.rope_scaling, DynamicRope):
        del numbers["max_seq_len"]
    return numbers


def other_numbers(ours: ModelArgs, theirs: ModelArgs) -> list[str]:
    """The numbers that make a second checkpoint another model, with both values."""
    wanted, found = defining_numbers(ours), computed_numbers(theirs)
    return [f"{key}: {value}, there {found.get(key)}" for key, value in wanted.items() if value != found.get(key)]


def args_to_json(args: ModelArgs) -> dict[str, Any]:
    """The numbers as titan_model.json lists them."""
    omitted = {f.name: f.default for f in fields(args) if f.name in _OMITTED_AT_DEFAULT or f.metadata.get("omitted")}
    return {name: value for name, value in all_numbers(args).items() if name not in omitted or value != omitted[name]}


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
        """Number of the layer that it belongs to."""
        head, _, rest = self.fqn.partition(".")
        return int(rest.partition(".")[0]) if head == "layers" else None

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


EXPERT_SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward that is a mixture of SwiGLU experts: a router sends each token to `top_k` of `num`.

    With `num_groups` > 1 the experts stand in groups of num / num_groups, and a token chooses only among those of the
    `top_groups` groups whose `best_of_group` largest scores have the largest sum.
    """

    num: int
    top_k: int
    hidden: int  # features inside of one expert
    normalize: bool = True  # the weights of the chosen experts are divided by their sum
    score: str = "softmax"  # of the router's logits: over all experts; or "sigmoid", of each
    scale: float = 1.0  # the weights are multiplied by it
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2
    shared_hidden: int = 0  # features inside of the expert that every token uses, whose output is added; 0: none
    balance_rate: float = 1e-3  # change of `expert_bias` per optimizer step (arXiv 2408.15664); 0: it stays as it is
    scales_input: bool = False  # a token's weight multiplies what its expert reads, and not the output
    # Experts are chosen by their logits, in float64, and not by scores: float32 sigmoids of large logits are all 1
    chooses_by_logits: bool = False
    has_biases: bool = False  # of the router and the experts
    clamp: float | None = None  # gates are at most `clamp`, up-projections within ± clamp, plus 1; as GPT-OSS computes
    fused_rows: bool = False  # one matrix has the rows of gates and up-projections in turn

    def __post_init__(self) -> None:
        if len({self.has_biases, self.clamp is not None, self.fused_rows}) > 1:
            raise ValueError("experts have biases, a clamp and fused rows together, or none of them")


@dataclass(frozen=True, slots=True)
class Dense:
    """A feed-forward whose gate goes through `activation`: SwiGLU or GeGLU."""

    hidden: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    has_biases: bool = False  # w1, w2 and w3 have one


@dataclass(frozen=True, slots=True)
class Norm:
    """Division by the root mean square of the features, times a weight, in fp32."""

    eps: float
    centers: bool = False  # LayerNorm: the mean is subtracted first
    plus_one: bool = False  # the factor is 1 + weight
    has_weight: bool = True


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of a layer: which features of a head of q and k are rotated, and by how much."""

    theta: float
    width: int  # rotated features of a head: the first ones; in latent attention the last ones
    pairs: bool  # features 0 and 1, 2 and 3, … are rotated together; False: 0 and width / 2, 1 and width / 2 + 1, …
    scaling: Scaling | None = None
    trained_length: int = 0  # in tokens, which DynamicRope computes with


def rope_of(args: "ModelArgs", *, pairs: bool, width: int | None = None) -> Rope:
    """The rotary embedding of all layers whose theta and scaling are those of ModelArgs."""
    length = args.max_seq_len if isinstance(args.rope_scaling, DynamicRope) else 0
    return Rope(args.rope_theta, width or args.head_dim, pairs, args.rope_scaling, length)


@dataclass(frozen=True, slots=True)
class Temperature:
    """q at position p is multiplied by 1 + beta * log(1 + floor((p + first) / length)) in fp32 (arXiv 2501.19399)."""

    beta: float
    length: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are made of one latent per token.

    A head of q and k has `plain_dim` features without a rotation, and behind them `rotary_dim` rotated ones. All heads
    share the rotated part of k.
    """

    num_heads: int
    q_rank: int  # size of the latent that q is made of; 0: q is made of the input
    kv_rank: int  # size of the latent that the plain part of k, and v, are made of
    plain_dim: int
    value_dim: int  # of each head
    rope: Rope
    norm: Norm  # of both latents
    scale: float  # factor of the scores

    @property
    def rotary_dim(self) -> int:
        """Rotated features of a head of q and k."""
        return self.rope.width


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Grouped-query attention with the dim, the heads and the head size of ModelArgs.

    A token sees itself and tokens before it: the last `window` with itself, or those of its chunk, where positions
    p // chunk are equal. With attention within documents by an index's offsets, positions are those of a document; with
    `document_mask = "eos"`, those of the sequence, which chunks and the temperature count.
    """

    rope: Rope | None  # None: no positions in this layer
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None  # over each head of q and k: before the rotation, but without a weight behind it
    scale: float | None = None  # factor of the scores; None: head_dim ** -0.5
    window: int | None = None  # None: all tokens before it
    chunk: int | None = None  # None: one chunk
    has_sinks: bool = False  # Role.SINK
    temperature: Temperature | None = None

    @property
    def needs_mask(self) -> bool:
        """Whether it is more than causal attention of q and k to all tokens, which every kernel computes."""
        return self.window is not None or self.chunk is not None or self.has_sinks


@dataclass(frozen=True, slots=True)
class Block:
    """What a layer computes. Layers with equal blocks differ only in their weights."""

    attention: Latent | GroupedQuery
    feed_forward: Dense | Experts
    before: Norm | None  # of what attention and feed-forward read
    after: Norm | None = None  # of what they return, before it is added to the residual stream

    @property
    def latent(self) -> Latent | None:
        """The block's attention if it is latent."""
        return self.attention if isinstance(self.attention, Latent) else None


def dense_block(args: ModelArgs, layer: int) -> Block:
    """Llama's layer, with the biases that ModelArgs says."""
    bias = args.attention_bias
    attention = GroupedQuery(rope_of(args, pairs=True), qkv_bias=bias, out_bias=bias)
    return Block(attention, Dense(args.ffn_hidden, has_biases=args.mlp_bias), Norm(args.norm_eps))


@dataclass(frozen=True, slots=True)
class Ends:
    """What a model computes before its first layer and behind its last one."""

    norm: Norm  # of the last layer's result
    # The factor of the embeddings, rounded to the dtype of the computation first, as Gemma does
    embedding_scale: float = 1.0


def plain_ends(args: ModelArgs) -> Ends:
    """An RMSNorm behind the last layer."""
    return Ends(Norm(args.norm_eps))


@dataclass(frozen=True, slots=True)
class FlavorAttention:
    """How the model of a flavor is trained, in torchtitan's words; the numbers of the model do not depend on it."""

    attn_type: str = "sdpa"  # the kernel: sdpa, flex or varlen
    attn_mask_type: str = "causal"  # block_causal: attention stays within a document


@dataclass(frozen=True, slots=True)
class Naming:
    """The names that a foreign naming gives a family's weights: invertible rules, and keys that are dropped."""

    name: str  # "hf" | "meta" | "torchtune" | "titan_model_prefix" | "titan_qkv_linear"
    rules: tuple[Rule, ...]
    drops: tuple[Drop, ...] = ()
    repeats_tied: bool = False  # a tied model has its output weight, too
    has_buffers: bool = False  # each checkpoint has what is saved and not trained; else such a tensor may be missing
    repeats: tuple[Rule, ...] = ()  # further names of tensors, whole names: copies that need not be there


@dataclass(frozen=True, slots=True)
class TrainedOtherwise:
    """What a trainer computes that has another model than the published one."""

    args: ModelArgs  # that say it most nearly
    unsaid: list[str]  # what no numbers say
    summary: str  # the differences, in a few words


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the files of Meta's releases that Meta's code takes apart, or renames, as it loads them."""

    name: str
    parts: Mapping[str, int]  # name in Meta's code → its share of a shard's rows; they follow one another
    stack: int = 0  # the number of matrices below one another that are a stack; 0: none are


@dataclass(frozen=True, slots=True)
class MetaFormat:
    """How Meta's format has the models of a family."""

    args_from_params: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], ModelArgs]  # params.json, shapes
    params: Callable[[ModelArgs], dict[str, Any]]
    key: str = ""  # a key of params.json that only this family's has; "": it has none of the other families'
    shard_dims: Mapping[str, int] = field(default_factory=dict)  # where shards are not cut along tp_dim
    stored: Callable[[ModelArgs], list[StoredTensor]] = lambda args: []


@dataclass(frozen=True, slots=True)
class Release:
    """config.json of a family's own release, which is not transformers'."""

    read: Callable[[Mapping[str, Any]], dict[str, Any] | None]  # as transformers would state it; None for other files
    write: Callable[[ModelArgs], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Multimodal:
    """A class of transformers that has a family's models as its text part, with encoders of other media beside."""

    architecture: str
    model_type: str
    text_key: str  # the field of config.json with the text part's fields
    naming: str  # the family's naming in checkpoints of this class
    extras: tuple[str, ...]  # native names of its other tensors, those of transformers; `{*}` stands for anything
    files: tuple[str, ...]  # small files of the class: how images become inputs
    outer_keys: tuple[str, ...] = ()  # fields of config.json beside `text_key` that describe the other tensors


def _any(args: ModelArgs) -> bool:
    return True


def _no_problems(args: ModelArgs) -> list[str]:
    return []


def _same_naming(naming: Naming, args: ModelArgs) -> Naming:
    return naming


def _any_shapes(naming: Naming, args: ModelArgs, tensors: Mapping[str, "TensorInfo"]) -> Naming:
    return naming


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. Instances are constants in `converters/families/<family>.py`, found through registry.py."""

    name: str
    flavors: Mapping[str, ModelArgs]
    parameters: Callable[[ModelArgs], list[Parameter]]  # in model order; a tied output is not listed
    namings: Mapping[str, Naming]
    args_from_hf_config: Callable[[Mapping[str, Any]], ModelArgs]
    hf_config: Callable[[ModelArgs], dict[str, Any]]  # without token ids and dtype, which the caller knows
    hf_architectures: tuple[str, ...]  # config.json's `architectures` that this family reads
    meta: MetaFormat | None = None  # None: Meta's format has no such models
    args_type: type[ModelArgs] = ModelArgs  # a subclass if the family has its own numbers, all with defaults
    keep_float32: tuple[str, ...] = ()  # native names, `{n}` for the layer: no `--dtype` of 16 bits or less casts them
    # Whether a model is of this family, where several share an architecture's name or Meta's format
    claims: Callable[[ModelArgs], bool] = _any
    hf_model_types: tuple[str, ...] = ()  # config.json's `model_type`s of hf_architectures
    block: Callable[[ModelArgs, int], Block] = dense_block  # what the layer of that number computes
    ends: Callable[[ModelArgs], Ends] = plain_ends
    attention_of: Mapping[str, FlavorAttention] = field(default_factory=dict)  # flavors with another than the default
    # (numbers, beyond_original) → what torchtitan v0.2.2's model computes; None: it computes the published model
    as_torchtitan_trained: Callable[..., TrainedOtherwise] | None = None
    problems: Callable[[ModelArgs], list[str]] = _no_problems  # what makes numbers impossible together
    multimodal: Multimodal | None = None
    # One of `namings` as models of these numbers have it, where a foreign format has several classes of one family
    naming_for: Callable[[Naming, ModelArgs], Naming] = _same_naming
    # The naming of a checkpoint's tensors among those of the same names, where only shapes distinguish them
    naming_by_shapes: Callable[[Naming, ModelArgs, Mapping[str, "TensorInfo"]], Naming] = _any_shapes
    release: Release | None = None
    quantized_as: tuple[str, ...] = ("fp8",)  # how such models are published, beside 16 bits (quantization.Scheme)

    def units(self, args: ModelArgs) -> list[str]:
        """Names of a model's units in order; a tied output is one without a parameter of its own."""
        units = units_of(self.parameters(args))
        return [*units, unit_of(OUTPUT)] if args.tied else units

    def blocks(self, args: ModelArgs) -> list[Block]:
        """The block of every layer."""
        return [self.block(args, layer) for layer in range(args.num_layers)]

    def value_dim(self, args: ModelArgs) -> int:
        """Features of a head of v; those of q and k are `head_dim`."""
        latent = self.block(args, 0).latent
        return latent.value_dim if latent else args.head_dim

    def num_parameters(self, args: ModelArgs) -> int:
        """Values that are trained."""
        return sum(prod(p.shape) for p in self.parameters(args) if p.is_trained)

    def num_active_parameters(self, args: ModelArgs) -> int:
        """Trained values that the computation for one token uses: of stacked experts those of `top_k`."""

        def active(parameter: Parameter) -> int:
            num_values = prod(parameter.shape)
            if parameter.expert_dim is None or parameter.layer is None:
                return num_values
            experts = self.block(args, parameter.layer).feed_forward
            assert isinstance(experts, Experts), f"{parameter.fqn}: `block` has no experts in this layer"
            return num_values // experts.num * experts.top_k

        return sum(active(p) for p in self.parameters(args) if p.is_trained)

    def has_role(self, role: Role, args: ModelArgs) -> bool:
        """Whether a model of these numbers has a parameter of that role."""
        return any(p.role is role for p in self.parameters(args))
