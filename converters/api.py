"""Public Python API for checkpoints: convert, reshard, verify, compare, inspect and read; register families, formats
and stores.

A checkpoint is a path, the name of a model that the hub's cache has (`meta-llama/Llama-3.2-1B`, `NAME@REVISION`), or a
URI of a store that `register_store` has added (and `register_outputs`, to write there).
Importing it does not import torch. Functions raise the errors of this module, all of them subclasses of TitanError.
"""

from collections.abc import Sequence

from converters.common.box import Box, TensorInfo
from converters.common.dtypes import itemsize, numpy_dtype
from converters.common.errors import CheckpointError, ConfigError, Missing, TitanError, UnsupportedError
from converters.containers.base import Container, Listing
from converters.containers.registry import register as _register_container
from converters.containers.target import Slot, Target
from converters.containers.tensor_pickle import row_major
from converters.conversion.records import Request, Run
from converters.convert import ConvertReport
from converters.convert import convert as _convert
from converters.diff import DiffReport
from converters.diff import diff as _diff
from converters.engine.copy import DEFAULT_WORKERS
from converters.families import hf_config, llama
from converters.families.args import DecoderArgs, ModelArgs
from converters.families.base import Family, Naming
from converters.families.blocks import (
    Block,
    Dense,
    Ends,
    Experts,
    GroupedQuery,
    Latent,
    Norm,
    Rope,
    Temperature,
    dense_block,
    rope_of,
)
from converters.families.parameters import Parameter, Role, layer_parameters, parameters_of, with_ends
from converters.families.registry import register as _register_family
from converters.families.rope import DynamicRope, LinearRope, RopeScaling, YarnRope
from converters.families.rules import Drop, Half, RopeHalves, Rows, Rule, Same, Stacked, Transposed, Zeros
from converters.formats.base import CommandHelp, Contents, Format, OutputOptions
from converters.formats.registry import get_format
from converters.formats.registry import register as _register_format
from converters.inspect import Inspection, inspect_checkpoint
from converters.integrity.verify_report import VerifyReport
from converters.layout.mesh_shape import MeshShape
from converters.reshard import ReshardReport, ReshardRequest
from converters.reshard import reshard as _reshard
from converters.source.weights import NativeWeights, open_native
from converters.store.base import Store, read_bytes, register_store
from converters.store.folder_output import FolderOutputs
from converters.store.hub_names import find_local
from converters.store.location import Location, Place, locate
from converters.store.mirror import local_copies
from converters.store.output import Output, Outputs, RunOutputs
from converters.store.outputs import register_outputs
from converters.store.paths import MissingFile
from converters.verify import verify as _verify
from converters.views.catalog import Catalog, Chunk, TensorEntry

__all__ = [
    "convert", "reshard", "verify", "diff", "inspect", "open_checkpoint", "register_family",
    "ConvertReport", "ReshardReport", "VerifyReport", "DiffReport", "Inspection", "NativeWeights", "TensorInfo", "Box",
    "Family", "ModelArgs", "DecoderArgs",
    "Block", "GroupedQuery", "Latent", "Dense", "Experts", "Norm", "Rope", "Temperature", "Ends",
    "RopeScaling", "LinearRope", "DynamicRope", "YarnRope", "rope_of", "dense_block",
    "Parameter", "Role", "parameters_of", "layer_parameters", "with_ends",
    "llama", "hf_config", "Naming", "Rule", "Same", "RopeHalves", "Stacked", "Half", "Rows", "Transposed", "Zeros",
    "Drop", "register_store", "register_outputs", "Location", "Store", "Output", "Outputs", "RunOutputs",
    "FolderOutputs", "MissingFile", "local_copies", "Place", "read_bytes",
    "register_container", "Container", "Listing", "Catalog", "TensorEntry", "Chunk", "row_major", "itemsize",
    "numpy_dtype",
    "register_format", "Format", "CommandHelp", "OutputOptions", "Contents", "Target", "Slot",
    "TitanError", "CheckpointError", "Missing", "ConfigError", "UnsupportedError",
]  # fmt: skip


def convert(
    src: Place,
    dst: Place,
    *,
    to: str,
    dtype: str | None = None,
    for_mesh: str | None = None,
    shard_bytes: int | None = None,
    num_shards: int | None = None,
    fused_experts: bool = False,
    drop_expert_bias: bool = False,
    quantize: str | None = None,
    scales_from: Place | None = None,
    mtp: str = "drop",
    keep_extra: bool | None = None,
    trained_by: str | None = None,
    select: str | None = None,
    model_from: Place | None = None,
    allow_missing: bool = False,
    allow_extra: bool = False,
    allow_nonfinite: bool = False,
    workers: int = DEFAULT_WORKERS,
    digests: bool = True,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> ConvertReport:
    """Convert the weights of a checkpoint of any format to `to`: `dcp`, `hf`, `meta`, `torch` or `torchtune`.

    Args:
        src: checkpoint folder or file; never changed.
        dst: folder to create; for `torch` also a `.pt`, `.pth` or `.bin` file.
        dtype: cast floating-point tensors to this type, such as `"bfloat16"`; None keeps the source's types.
        for_mesh: for `dcp`: shard for this mesh, such as `"dp_shard=8,tp=2"`.
        shard_bytes: largest size of an output file, for formats with a free number of files.
        num_shards: for `meta`: number of `consolidated.NN.pth` files.
        fused_experts: for `hf`: one tensor for all experts of a layer instead of one each.
        drop_expert_bias: for `hf`, `openai` and `meta`: leave out balancing offsets of experts that are not zero.
        quantize: for `hf`: `"fp8"` or `"fp8:ue8m0"`, float8 weights with a scale for each block of 128 × 128.
        scales_from: with `quantize`: fp8 folder of the same model whose scales are kept if the values fit.
        mtp: `"drop"` or `"keep"` layers for multi-token prediction.
        keep_extra: keep what a multimodal checkpoint has beside its text model; None: if the source has titan's names.
        trained_by: for a DCP of torchtitan: `"torchtitan-0.2.2"`, `"torchtitan-0.2.2-yarn"` or `"titan"`.
        select: the model, if `src` holds several, such as `"policy"`.
        model_from: folder that describes the model, for a source that does not.
        allow_missing, allow_extra, allow_nonfinite: turn these errors into entries of the report.
        workers: copying threads.
        digests: write a digest of each tensor to the manifest.
        overwrite: replace `dst` once the new output is complete.
        resume: continue an interrupted run of the same conversion.
        dry_run: plan and check, write nothing.

    >>> report = convert("my-model", "my-model-dcp", to="dcp", dtype="bfloat16")
    >>> report.model, report.dtypes.keys()
    ('llama3, 2 layers, dim 32', dict_keys(['bfloat16']))
    """
    request = Request(
        find_local(src),
        locate(dst),
        get_format(to),
        options=OutputOptions(
            mesh=None if for_mesh is None else MeshShape.parse(for_mesh),
            shard_bytes=shard_bytes,
            num_shards=num_shards,
            fused_experts=fused_experts or None,
            drop_expert_bias=drop_expert_bias or None,
            quantize=quantize,
            scales_from=_found(scales_from),
        ),
        dtype=dtype,
        select=select,
        model_from=_found(model_from),
        allow_missing=allow_missing,
        allow_extra=allow_extra,
        allow_nonfinite=allow_nonfinite,
        mtp=mtp,
        keep_extra=keep_extra,
        trained_by=trained_by,
    )
    return _convert(request, Run(workers, digests, resume, overwrite, dry_run))


def reshard(
    src: Place,
    dst: Place,
    *,
    for_mesh: str | None = None,
    num_files: int | None = None,
    shard_bytes: int | None = None,
    dtype: str | None = None,
    optimizer_dtype: str | None = None,
    drop: Sequence[str] = (),
    select: str | None = None,
    model_from: Place | None = None,
    allow_missing: bool = False,
    workers: int = DEFAULT_WORKERS,
    digests: bool = True,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> ReshardReport:
    """Reshard a DCP training checkpoint, with its optimizer and all other sections.

    Give one of `for_mesh` (such as `"dp_shard=8,tp=2"`), `num_files` and `shard_bytes`. `drop` names sections to leave
    out: model, optimizer, lr_scheduler, dataloader, train_state, rng. The other arguments are those of `convert`.

    >>> _ = convert("my-model", "step-1", to="dcp")
    >>> report = reshard("step-1", "step-1-fsdp2", for_mesh="dp_shard=2")
    >>> report.cut, report.sections.keys()
    ('mesh dp_shard=2', dict_keys(['model']))
    """
    request = ReshardRequest(
        find_local(src),
        locate(dst),
        mesh=None if for_mesh is None else MeshShape.parse(for_mesh),
        num_files=num_files,
        shard_bytes=shard_bytes,
        dtype=dtype,
        optimizer_dtype=optimizer_dtype,
        drop=drop,
        select=select,
        model_from=_found(model_from),
        allow_missing=allow_missing,
    )
    return _reshard(request, Run(workers, digests, resume, overwrite, dry_run))


def verify(
    path: Place, *, quick: bool = False, select: str | None = None, model_from: Place | None = None
) -> VerifyReport:
    """Check a checkpoint: structure, names, shapes, checksums, digests. `quick` reads no tensor.

    The report lists each check with its outcome; a checkpoint that cannot be opened is a failed check.

    >>> _ = convert("my-model", "copy", to="hf")
    >>> report = verify("copy")
    >>> report.ok, [check.outcome for check in report.checks if check.name == "files"]
    (True, ['ok'])
    """
    return _verify(find_local(path), quick=quick, select=select, model_from=_found(model_from))


def diff(a: Place, b: Place, *, select: Sequence[str] = (), model_from: Place | None = None) -> DiffReport:
    """Compare two checkpoints of any formats: structure, dtypes and values, by native parameter names.

    `select`: the model of a checkpoint that holds several; two names are that of `a` and that of `b`.

    >>> _ = convert("my-model", "rounded", to="torch", dtype="bfloat16")
    >>> report = diff("my-model", "rounded")
    >>> report.equal, report.first_tensor
    (False, 'tok_embeddings.weight')
    """
    return _diff(find_local(a), find_local(b), select=select, model_from=_found(model_from))


def inspect(
    path: Place, *, fold: bool = True, select: str | None = None, model_from: Place | None = None
) -> Inspection:
    """Describe a checkpoint from its headers: model, tensors, sections, values. `fold` groups tensors over layers.

    >>> found = inspect("my-model")
    >>> found.container, found.naming, found.model["num_layers"], found.num_parameters
    ('safetensors', 'hf', 2, 42848)
    """
    return inspect_checkpoint(find_local(path), fold=fold, select=select, model_from=_found(model_from))


def open_checkpoint(path: Place, *, select: str | None = None, model_from: Place | None = None) -> NativeWeights:
    """Open a checkpoint of any format to read its weights under native names. Use it as a context manager.

    Only headers are read here. `tensors` maps names to TensorInfo (dtype, shape); `read` returns a numpy array of a
    tensor, or of a `Box` of it, and reads only those bytes. `info` has the family and the numbers of the model.

    >>> with open_checkpoint("my-model") as weights:
    ...     weights.info.family, weights.tensors["norm.weight"].shape, weights.read("norm.weight").sum()
    ('llama3', (32,), np.float32(32.0))
    """
    return open_native(find_local(path), select=select, model_from=_found(model_from))


def _found(path: Place | None) -> Location | None:
    return None if path is None else find_local(path)


def register_family(family: Family) -> None:
    """Register a model family of your own when your module is imported. One of a built-in name may only add flavors.

    >>> from dataclasses import replace
    >>> from converters.families.registry import get_family
    >>> register_family(replace(get_family("llama3"), name="my_llama"))
    """
    _register_family(family)


def register_container(container: Container) -> None:
    """Register a way to store tensors in files: how its files are found in a folder, and opened as a Catalog.

    >>> from dataclasses import replace
    >>> from converters.containers.safetensors import SAFETENSORS
    >>> register_container(replace(SAFETENSORS, name="my_files", find=lambda files: ""))
    """
    _register_container(container)


def register_format(format: Format) -> None:
    """Register a format, a container with a naming: `titan convert NAME-to-dcp`, `dcp-to-NAME` and `auto --to NAME`.

    >>> from dataclasses import replace
    >>> register_format(replace(get_format("torch"), name="my_format", naming=lambda family, options: None))
    """
    _register_format(format)
