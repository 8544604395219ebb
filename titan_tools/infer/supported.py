"""What `titan infer` cannot compute yet of a model. Torch-free."""

from converters.errors import UnsupportedError
from converters.families.base import Experts, Family, ModelArgs


def unsupported_features(family: Family, args: ModelArgs) -> list[str]:
    """Features of the model's layers."""
    blocks = family.blocks(args)
    features = {
        "latent attention": any(block.attention is not None for block in blocks),
        "shared experts": any(isinstance(b.feed_forward, Experts) and b.feed_forward.shared_hidden for b in blocks),
    }
    return [feature for feature, is_used in features.items() if is_used]


def check_supported(family: Family, args: ModelArgs) -> None:
    """Raise UnsupportedError with every feature that inference does not have."""
    found = unsupported_features(family, args)
    if found:
        raise UnsupportedError(
            f"titan infer does not support {' and '.join(found)}, which models of family {family.name} have",
            hint="titan convert writes a Hugging Face folder, which transformers and vLLM run",
        )
