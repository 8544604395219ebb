"""The records of a conversion: what is asked for, what is written, how, and what came of it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from converters.common.box import TensorSource
from converters.containers.target import Target
from converters.engine.copy import DEFAULT_WORKERS
from converters.engine.read import CatalogReader
from converters.formats.base import Format, OutputOptions
from converters.integrity.source_check import Vouched
from converters.store.location import Place
from converters.views.catalog import Catalog
from converters.views.encoder import Encoder
from converters.views.expressions import RowNumbers

Progress = Callable[[int, str], AbstractContextManager[Callable[[int], None]]]  # (total bytes, what) → advance(bytes)


def no_progress(total_bytes: int, what: str) -> AbstractContextManager[Callable[[int], None]]:
    """A Progress that shows nothing."""
    return nullcontext(lambda num_bytes: None)


def no_small_files(folder: Path) -> list[str]:
    """Write nothing but the tensors."""
    return []


@dataclass(frozen=True, slots=True)
class Request:
    """What a conversion is asked for: the options of `titan convert` that are not in Run.

    `source`: the format that `src` is expected to have; another one is an error that names the right command.
    `options`: what the format lets one choose. `dtype` casts the floating tensors (plan.find_casts). `select`: the
    model, if `src` holds several. `mtp`: "keep" or "drop" layers for multi-token prediction. `keep_extra`: keep the
    tensors, files and fields of config.json that a multimodal checkpoint has beside its text model, or take those of
    `model_from`; None: keep them if the source has native names. `trained_by`: one of trained_by.TRAINED_BY.
    """

    src: Place
    dst: Place
    output: Format
    source: Format | None = None
    options: OutputOptions = OutputOptions()  # noqa: RUF009  frozen
    dtype: str | None = None
    select: str | None = None
    model_from: Place | None = None
    allow_missing: bool = False
    allow_extra: bool = False
    allow_nonfinite: bool = False
    mtp: str = "drop"
    keep_extra: bool | None = None
    trained_by: str | None = None

    @property
    def keep_mtp(self) -> bool:
        """Whether layers for multi-token prediction are kept."""
        return self.mtp == "keep"


@dataclass(frozen=True, slots=True)
class Run:
    """How a plan is carried out. Without `digests` the manifest has only the CRC32 of every file."""

    workers: int = DEFAULT_WORKERS
    digests: bool = True
    resume: bool = False  # continue from what an earlier attempt at the same plan has written
    overwrite: bool = False
    dry_run: bool = False  # stop once all is planned and checked
    progress: Progress = no_progress


RUN = Run()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is written, and what it is read from."""

    source: TensorSource
    target: Target
    casts: Mapping[str, str] = field(default_factory=dict)  # name → dtype
    write_small_files: Callable[[Path], list[str]] = no_small_files  # returns the names of what it wrote
    carried: Collection[Path] = ()  # the files that `write_small_files` copies
    catalog: Catalog | None = None  # of the source; without one, the work cannot be resumed
    readers: Collection[CatalogReader] = ()  # of all files that are read; they must not change meanwhile
    native_rows: RowNumbers | None = None  # None: rows are written in native order
    vouched: Vouched | None = None  # the digests that the values must have as they are read
    encoders: Mapping[str, Encoder] = field(default_factory=dict)  # quantize tensors of `source` (copy_tensors)
    quantization: str = ""  # text that identifies what the encoders do
    is_dequantized: bool = False  # values are made of codes and scales
    allow_nonfinite: bool = True  # count values that are NaN or infinite, or refuse them


@dataclass(frozen=True, slots=True)
class Needs:
    """An estimate. `free_bytes` is what the disk of the destination has; `fits` says whether that is enough."""

    memory_bytes: int  # peak, anonymous
    disk_bytes: int  # the small files and the journal included
    free_bytes: int
    fits: bool
    secs: float  # at the rate below
    bytes_per_sec: float


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of a plan: non-finite values by tensor, and the small files that were written."""

    non_finite: Mapping[str, int] = field(default_factory=dict)
    other_files: Sequence[str] = ()
    relative_error: Mapping[str, float] = field(default_factory=dict)  # the largest error of a cast, by tensor
    remarks: tuple[str, ...] = ()  # about what an earlier attempt left
    resumed_bytes: int = 0  # of the data: written by an earlier attempt, and read back
    num_moved: int | None = None  # scales of quantized weights that differ from known ones
    needs: Needs | None = None  # of a dry run, which writes nothing
