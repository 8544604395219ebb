"""The model that a config names: family, numbers, and the tokenizer that its checkpoints carry along. Torch-free."""

from pathlib import Path

from converters.assets import find_assets, read_token_ids
from converters.families.registry import get_family
from converters.model_info import ModelInfo
from trainer.config.sections import Model


def chosen_model(model: Model) -> ModelInfo:
    args = get_family(model.name).flavors[model.flavor]
    assets = find_assets(Path(model.hf_assets_path))
    return ModelInfo(model.name, args, assets, read_token_ids(assets, vocab_size=args.vocab_size))
