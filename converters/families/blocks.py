"""What a layer computes: attention, feed-forward and norms, as records that a family makes of its numbers."""

from dataclasses import dataclass
from typing import Literal

from converters.families.args import DecoderArgs
from converters.families.rope import DynamicRope, Scaling

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


def rope_of(args: "DecoderArgs", *, pairs: bool, width: int | None = None) -> Rope:
    """The rotary embedding of all layers whose theta and scaling are those of DecoderArgs."""
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
    """Grouped-query attention with the dim, the heads and the head size of DecoderArgs.

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
    parallel: bool = False  # both read the residual stream of before the layer, through one norm
    residual: float = 1.0  # the factor of what is added to the residual stream

    @property
    def latent(self) -> Latent | None:
        """The block's attention if it is latent."""
        return self.attention if isinstance(self.attention, Latent) else None


def dense_block(args: DecoderArgs, layer: int) -> Block:
    """Llama's layer, with the biases that DecoderArgs says."""
    bias = args.attention_bias
    attention = GroupedQuery(rope_of(args, pairs=True), qkv_bias=bias, out_bias=bias)
    return Block(attention, Dense(args.ffn_hidden, has_biases=args.mlp_bias), Norm(args.norm_eps))


@dataclass(frozen=True, slots=True)
class Ends:
    """What a model computes before its first layer and behind its last one."""

    norm: Norm  # of the last layer's result
    # The factor of the embeddings, rounded to the dtype of the computation first, as Gemma does
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


def plain_ends(args: DecoderArgs) -> Ends:
    """An RMSNorm behind the last layer."""
    return Ends(Norm(args.norm_eps))
