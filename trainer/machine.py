"""What this machine cannot run, feature by feature: told before anything is built, all at once."""

from collections.abc import Callable

import torch

from converters.errors import UnsupportedError, list_offenders
from trainer.checkpoints.problems import checkpoint_machine_problems
from trainer.config.sections import Config
from trainer.data.batch import pinning_machine_problems
from trainer.parallel.async_tensor import async_tensor_machine_problems
from trainer.parallel.compile import compile_machine_problems
from trainer.parallel.float8 import float8_machine_problems
from trainer.stages import schedule_machine_problems
from trainer.watching.profiling import profiling_machine_problems

# Each stands in its feature's own file: (config, device) → problems
_CHECKS: tuple[Callable[[Config, torch.device], list[str]], ...] = (
    profiling_machine_problems,
    schedule_machine_problems,
    compile_machine_problems,
    async_tensor_machine_problems,
    float8_machine_problems,
    checkpoint_machine_problems,
    pinning_machine_problems,
)


def refuse_what_cannot_run(config: Config, device: torch.device) -> None:
    """Raise UnsupportedError with everything that the config asks for and `device` cannot do."""
    problems = [problem for check in _CHECKS for problem in check(config, device)]
    if problems:
        raise UnsupportedError(f"this machine ({device.type}) cannot run the config:" + list_offenders(problems))
