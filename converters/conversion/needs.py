"""Estimate the memory, disk space and time of a conversion, for `--dry-run` and the check of free space."""

from collections.abc import Collection
from pathlib import Path

from converters.common.box import TensorSource
from converters.common.names import TIKTOKEN_MODEL, TOKENIZER_JSON
from converters.common.sizes import MIB
from converters.containers.target import Target
from converters.conversion.records import Needs, Plan
from converters.engine.units import UNIT_BYTES
from converters.store.local_files import is_file, size
from converters.store.location import Place, locate
from converters.store.outputs import outputs_at, require_space
from converters.views.expressions import TRANSPOSED_ROWS
from converters.views.view import View

# HF → DCP of a 1.2B bf16 Llama (2.47 GB; permutation, CRC32, digests), warm cache, 2 cores, fsync included: 2.1 s.
# A slower disk is the bottleneck instead.
COPY_BYTES_PER_SEC = 1.2e9
# Of a worker, in bytes that are written: values that are made of fp8 codes, and codes that are made of values
DEQUANTIZE_BYTES_PER_SEC = 0.5e9
QUANTIZE_BYTES_PER_SEC = 0.1e9
TRANSPOSE_BYTES_PER_SEC = 0.3e9
START_SECS = 0.3
# Upper bounds of the anonymous memory of the process: the interpreter with numpy; a worker's buffers; one slot with its
# chunk, its place in the index and its line of the metadata. Measured for that Llama: 34 MiB with one worker, 62 with
# eight (a worker has more to hold where tensors are cut along columns); 285 MiB for one of 470,000 chunks.
BASE_BYTES = 40 * MIB
WORKER_BYTES = 16 * MIB
TRANSPOSING_WORKER_BYTES = 24 * MIB  # measured for experts of Llama 4 Scout: 19 on the way in, 22 on the way out
SLOT_BYTES = 600
TENSOR_BYTES = 1000  # of the source or the output. Measured for 37,000 experts: 45 MiB to read, as many again to write
SLOT_SECS = 1e-4  # 470,000 chunks of no size: 57 s
# Upper bounds on disk besides the tensor data: configs and a recipe; a tensor's and a file's line of the manifest; a
# unit's line of the journal, which exists until the end
_CONFIG_BYTES = 128 * 1024
_TENSOR_LINE_BYTES = 160
_FILE_LINE_BYTES = 80
_UNIT_LINE_BYTES = 384
# A carried file may be written twice (torchtune's folder), and a tokenizer in another form, too. A tokenizer.json made
# of Llama 3's tokenizer.model is 8 times as long as that.
_CARRIED, _TRANSLATED = 2, 10


def estimate_needs(dst: Place, plan: Plan, *, workers: int) -> Needs:
    """The needs of writing a plan to `dst` with `workers` threads."""
    transposes = _transposes(plan.source)
    worker_bytes_per_sec = DEQUANTIZE_BYTES_PER_SEC if plan.is_dequantized else COPY_BYTES_PER_SEC
    if plan.encoders:
        worker_bytes_per_sec = QUANTIZE_BYTES_PER_SEC
    elif transposes:
        worker_bytes_per_sec = TRANSPOSE_BYTES_PER_SEC
    bytes_per_sec = min(COPY_BYTES_PER_SEC, worker_bytes_per_sec * workers)
    disk_bytes = needed_bytes(plan.target, plan.carried)
    outputs, location = outputs_at(locate(dst)), locate(dst)
    # The output is made in the parent of `dst`. Raises if nothing can be written there.
    free_bytes = outputs.free_bytes(location.absolute().parent)
    worker_bytes = TRANSPOSING_WORKER_BYTES if transposes else WORKER_BYTES
    if outputs.only_appends:
        worker_bytes += 2 * UNIT_BYTES  # values that wait for those before them
    num_read = 0 if plan.catalog is None else len(plan.catalog.tensors)
    return Needs(
        memory_bytes=BASE_BYTES
        + worker_bytes * workers
        + SLOT_BYTES * len(plan.target.slots)
        + TENSOR_BYTES * (num_read + len(plan.target.tensors)),
        disk_bytes=disk_bytes,
        free_bytes=free_bytes,
        fits=free_bytes >= disk_bytes - outputs.bytes_left_behind(location),
        secs=START_SECS + SLOT_SECS * len(plan.target.slots) + plan.target.total_bytes / bytes_per_sec,
        bytes_per_sec=bytes_per_sec,
    )


def _transposes(source: TensorSource) -> bool:
    """Whether large matrices are transposed on the way."""
    while isinstance(source, View):
        if any(expression.rows_together >= TRANSPOSED_ROWS for expression in source.expressions.values()):
            return True
        source = source.source
    return False


def require_room(dst: Place, plan: Plan) -> None:
    """Raise CheckpointError if the disk of `dst` has no room for the output, minus what earlier attempts occupy."""
    location = locate(dst)
    num_bytes = needed_bytes(plan.target, plan.carried) - outputs_at(location).bytes_left_behind(location)
    require_space(location, max(0, num_bytes))


def needed_bytes(target: Target, carried: Collection[Path] = ()) -> int:
    """An upper bound of the bytes on disk while `target` is written: data, small files, manifest and journal."""
    lone = TOKENIZER_JSON not in {path.name for path in carried}
    small_bytes = sum(
        size(path) * (_TRANSLATED if lone and path.name == TIKTOKEN_MODEL else _CARRIED)
        for path in carried
        if is_file(path)
    )
    manifest_bytes = sum(len(fqn) + _TENSOR_LINE_BYTES for fqn in target.tensors)
    manifest_bytes += sum(len(name) + _FILE_LINE_BYTES for name in target.file_bytes)
    num_units = len(target.tensors) + 2 * target.total_bytes // UNIT_BYTES
    return target.total_bytes + _CONFIG_BYTES + small_bytes + manifest_bytes + num_units * _UNIT_LINE_BYTES
