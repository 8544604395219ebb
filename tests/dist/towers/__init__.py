"""A model and an objective that are no language model's, as a user's own package: a flow from noise to images.

Imported by its path (experimental.custom_import). Nothing here imports torch.
"""

from converters.api import register_family
from towers.family import TOWERS
from towers.objective import FLOW
from towers.settings import Images
from trainer.api import TrainerFamily, register_model, register_section


def build_model(args):
    from towers.model import Towers

    return Towers(args)


register_family(TOWERS)
register_model("towers", TrainerFamily(build_model, objective=FLOW))
register_section("images", Images)
