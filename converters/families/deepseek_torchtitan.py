"""Numbers for what torchtitan v0.2.2 has trained: its DeepSeek model differs from the published one."""

from dataclasses import replace

from converters.families.deepseek_v3 import SOFTMAX, DeepSeekArgs
from converters.families.foreign import TrainedOtherwise
from converters.families.rope import YarnRope

_EPS = 1e-5  # of every flavor; of the latents' norms too, for which transformers' classes have 1e-6
_LITE_MAGNITUDE = 0.70  # of the flavors whose published model has 0.707


def as_torchtitan_trained(args: DeepSeekArgs, *, beyond_original: bool) -> TrainedOtherwise:
    """What v0.2.2 trained.

    `beyond_original`: with a training.seq_len above YaRN's original length; up to it v0.2.2 leaves YaRN out.
    """
    scaling, longest = args.rope_scaling, args.max_seq_len
    unsaid = [
        f"norms of latents with an epsilon of {_EPS:g} (1e-06 in transformers' classes)",
        "the last norm with torch's default epsilon, that of the element type",
    ]
    if isinstance(scaling, YarnRope):
        if not beyond_original:
            longest, scaling = min(longest, scaling.original_max_position_embeddings), None
        elif scaling.mscale_all_dim == 0.707:
            scaling = replace(scaling, mscale=_LITE_MAGNITUDE, mscale_all_dim=_LITE_MAGNITUDE)
    summary = "YaRN, epsilons"
    if args.score == SOFTMAX and args.num_groups > 1:
        summary += ", groups"
        unsaid.append("groups of experts chosen by the sum of their two best scores (V2: by the best)")
    trained = replace(args, norm_eps=_EPS, rope_scaling=scaling, max_seq_len=longest)
    return TrainedOtherwise(trained, unsaid, summary)
