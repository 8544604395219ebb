"""Models that a version of transformers before the newest computes otherwise than titan does.

titan computes as transformers 5.23. Changes, each read in the packages before and after it: YaRN from 4.51 and from
4.57 on, DeepSeek V2's attention from 5.15 on.
"""

import re
from collections.abc import Mapping
from typing import Any

from converters.families.args import DecoderArgs, ModelArgs
from converters.families.rope import YarnRope


def differences_of_version(config: Mapping[str, Any], args: ModelArgs) -> list[str]:
    """Where the version of transformers that saved a config.json computes other numbers; [] if it does not.

    A model whose code is in its repository (`auto_map`) is not computed by transformers' class.
    """
    stated = str(config.get("transformers_version", ""))
    written_by = re.match(r"(\d+)\.(\d+)", stated)
    if written_by is None or config.get("auto_map") or not isinstance(args, DecoderArgs):
        return []
    rope = args.rope_scaling
    if not isinstance(rope, YarnRope):
        return []
    version, kind = (int(written_by[1]), int(written_by[2])), str(config.get("model_type", ""))
    length, original = args.max_seq_len, rope.original_max_position_embeddings
    differs = []
    if version < (4, 51) and not kind.startswith("deepseek") and (length != original or rope.mscale):
        differs.append(
            f"YaRN before 4.51 reads neither original_max_position_embeddings ({original:,}) nor mscale, and blends "
            f"frequencies by max_position_embeddings ({length:,})"
        )
    if (4, 51) <= version < (4, 57) and rope.factor != length / original:
        differs.append(
            f"YaRN of 4.51 to 4.56 scales by max_position_embeddings / original_max_position_embeddings "
            f"({length / original:g}) instead of factor ({rope.factor:g})"
        )
    if kind == "deepseek_v2" and (4, 54) <= version < (5, 15) and rope.mscale_all_dim:
        differs.append(f"attention of 4.54 to 5.14 is not scaled by mscale_all_dim ({rope.mscale_all_dim:g})")
    return [
        f"config.json was saved by transformers {stated}, which computes another model: {text}; titan computes as "
        "transformers 5.23"
        for text in differs
    ]
