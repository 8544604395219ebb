"""How wide Llama 3's first weights are drawn. Torch-free: seed checkpoints are written without torch."""

from math import sqrt

from converters.families.base import ModelArgs
from trainer.models.spread import Constant, Normal, Spread

_STD = 0.02
_DEPTH_SCALED = ("attention.wo", "feed_forward.w2", "feed_forward.w3")


def initial_spread(fqn: str, args: ModelArgs) -> Spread:
    """The distribution of a parameter's first values, as torchtitan draws them.

    A tied embedding is drawn like the output projection: as an embedding (std 1) its logits would start √dim wide.
    """
    if fqn == "output.weight" or (fqn == "tok_embeddings.weight" and args.tied):
        return Normal(args.dim**-0.5, cut=3.0)
    if fqn == "tok_embeddings.weight":
        return Normal(1.0)
    if fqn == "norm.weight" or fqn.endswith("_norm.weight"):
        return Constant(1.0)
    if fqn.endswith(".bias"):
        return Constant(0.0)
    _, layer, module = fqn.removesuffix(".weight").split(".", 2)
    # deeper layers add to a residual stream that has already grown
    return Normal(_STD / sqrt(2 * (int(layer) + 1))) if module in _DEPTH_SCALED else Normal(_STD)
