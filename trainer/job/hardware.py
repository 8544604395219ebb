"""Hardware checks of a config. torch is imported only for GPUs and for settings that need it."""

from converters.common.errors import UnsupportedError, list_offenders
from converters.families.registry import get_family
from trainer.checkpoints.problems import checkpoint_machine_problems
from trainer.config.sections import Config
from trainer.data.kinds import pinning_machine_problems
from trainer.observability.profiling import profiling_machine_problems
from trainer.parallel.async_tensor import async_tensor_machine_problems
from trainer.parallel.compile import compile_machine_problems
from trainer.parallel.document_mask import masked_machine_problems
from trainer.parallel.float8 import float8_machine_problems, is_float8
from trainer.parallel.stages import schedule_machine_problems
from trainer.ranks.machine import Device


def check_hardware(config: Config, device: Device) -> None:
    """Raise UnsupportedError with everything that the config asks for and a machine with such devices cannot do."""
    degrees = config.parallelism
    problems = [
        *profiling_machine_problems(config.profiling, device),
        *schedule_machine_problems(degrees),
        *compile_machine_problems(
            config.compile,
            config.activation_checkpoint,
            device,
            tp=degrees.tensor_parallel_degree,
            ep=degrees.expert_parallel_degree,
        ),
        *async_tensor_machine_problems(degrees, device),
        *masked_machine_problems(config, get_family(config.model.name), device),
        *(float8_machine_problems(config.float8, device) if is_float8(config.model) else ()),
        *checkpoint_machine_problems(config.checkpoint),
        *pinning_machine_problems(config.dataloader, config.validation_dataloader, device),
    ]
    if problems:
        raise UnsupportedError(f"this machine ({device.type}) cannot run the config:" + list_offenders(problems))
