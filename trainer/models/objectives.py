"""What the models of each family learn. Torch-free."""

from trainer.models.registry import get_trainer_family
from trainer.next_token.objective import NEXT_TOKEN
from trainer.objective import Objective


def get_objective(family: str) -> Objective:
    """The family's own objective, else next-token prediction."""
    return get_trainer_family(family).objective or NEXT_TOKEN
