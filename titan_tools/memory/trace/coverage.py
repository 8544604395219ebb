"""What no trace can follow: settings that are refused before the build, and errors that show during a trace."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from converters.common.errors import UnsupportedError
from converters.layout.mesh_shape import MeshShape
from trainer.config.sections import Config

TRACED_BACKENDS = ("inductor", "aot_eager", "eager")


class NotTraceable(UnsupportedError):
    """`nearest`: keys of the config → values that would be traced instead."""

    def __init__(self, message: str, *, hint: str, nearest: Mapping[str, str]):
        super().__init__(message, hint=hint)
        self.nearest = dict(nearest)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes: compilers and pipelines wrap the errors of a model."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


@dataclass(frozen=True, slots=True)
class TraceGap:
    """A setting that no trace follows: its keys, when they ask for it, the reason, and the nearest supported value."""

    keys: tuple[str, ...]
    is_asked_for: Callable[[Config, MeshShape], bool]
    reason: str
    nearest: str  # value of the first key


GAPS = (
    TraceGap(
        ("debug.deterministic", "debug.deterministic_warn_only"),
        lambda config, dims: config.debug.deterministic,
        "debug.deterministic: the buffers of kernels that add up in a fixed order (attention's backward has one for"
        " every few multiprocessors) are not known; nearest: false",
        "false",
    ),
    TraceGap(
        ("compile.backend",),
        lambda config, dims: (
            config.compile.enable and bool(config.compile.components) and config.compile.backend not in TRACED_BACKENDS
        ),
        f"compile.backend: what a compiler other than {', '.join(TRACED_BACKENDS)} keeps and fuses is not known;"
        " nearest: inductor",
        "inductor",
    ),
)


def trace_gaps(config: Config, dims: MeshShape) -> list[TraceGap]:
    """The settings of a config that no trace follows; empty if the trace is valid."""
    return [gap for gap in GAPS if gap.is_asked_for(config, dims)]
