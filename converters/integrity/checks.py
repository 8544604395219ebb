"""The checks of a checkpoint that need no manifest: structure, names and shapes, CRC32s of items, readable values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from converters.common.box import TensorSource
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, TitanError, UnsupportedError
from converters.common.names import HF_CONFIG, MANIFEST
from converters.containers.base import Container
from converters.containers.registry import CONTAINERS
from converters.engine.read import BLOCK_BYTES, CatalogReader
from converters.engine.units import whole_row_units
from converters.families.args import describe_size, num_layers
from converters.families.registry import get_family
from converters.integrity.verify_report import Check
from converters.model.model_info import describes_model
from converters.model.mtp import num_mtp_layers, with_mtp
from converters.naming.foreign_view import native_row_numbers
from converters.quantized.quantized_tensors import DequantizedSource, QuantizedTensors
from converters.source.model_from import find_model_info
from converters.source.weights import model_part, naming_of, native_weights, quantized_tensors
from converters.store.digest import TensorDigest
from converters.store.hub_checksums import fetch_again, has_content, recorded_files
from converters.store.local_files import exists
from converters.store.location import Place
from converters.store.manifest import TensorSum, in_threads
from converters.store.paths import refuse_links_out
from converters.views.casts import count_non_finite
from converters.views.catalog import Catalog
from converters.views.expressions import RowNumbers


def check_structure(catalog: Catalog) -> Check:
    """The checks that opening has made already."""
    files = catalog.tensor_files
    num_chunks = sum(len(entry.chunks) for entry in catalog.tensors.values())
    parts = [
        f"{num_chunks:,} chunks cover {len(catalog.tensors):,} tensors exactly",
        f"{len(files):,} files of the expected size" if len(files) > 1 else "1 file of the expected size",
    ]
    if rules := CONTAINERS[catalog.container].rules:
        parts.append(rules)
    if catalog.items:
        parts.append(f"{len(catalog.items):,} other entries")
    return Check("structure", "ok", "; ".join(parts))


def check_reading(catalog: Catalog) -> list[Check]:
    """A warning for notes on how the weights were found."""
    return [Check("reading", "warning", "how the weights were found", tuple(catalog.notes))] if catalog.notes else []


def check_container(catalog: Catalog, *, is_folder: bool) -> list[Check]:
    """The checks that only one container has."""
    index = _check_index(catalog, CONTAINERS[catalog.container]) if is_folder else []
    return [*_check_gaps(catalog), *index]


def _check_index(catalog: Catalog, container: Container) -> list[Check]:
    """A warning for oddities of the index that opening accepts."""
    remarks = container.index_remarks(catalog.store, sum(entry.num_bytes for entry in catalog.tensors.values()))
    return [Check("index", "warning", "all tensors are where the index says, but", tuple(remarks))] if remarks else []


def _check_gaps(catalog: Catalog) -> list[Check]:
    """A warning for bytes that belong to no item, or to two, in files of which all data is in items, as in DCP."""
    extents: dict[str, set[tuple[int, int]]] = {}
    in_no_item = set()
    for entry in catalog.tensors.values():
        for chunk in entry.chunks:
            if chunk.item is None:
                in_no_item.add(chunk.file)
            else:
                extents.setdefault(chunk.file, set()).add(chunk.item)
    for item in catalog.items.values():
        extents.setdefault(item.file, set()).add((item.byte_offset, item.length))
    remarks = []
    for file in sorted(extents.keys() - in_no_item):
        size, used = catalog.store.size(file), sum(length for _, length in extents[file])
        if size != used:
            remarks.append(f"{file}: {size:,} bytes, of which its items take {used:,}")
    return (
        [Check("items", "warning", "files hold other bytes than those of their items", tuple(remarks))]
        if remarks
        else []
    )


@dataclass(frozen=True, slots=True)
class DigestRules:
    """The values that the digests of stored tensors are computed from."""

    native_rows: RowNumbers | None = None  # None: rows are stored in native order
    quantized: QuantizedTensors | None = None

    def source_for(self, reader: CatalogReader, fqn: str, listed: TensorSum | None) -> TensorSource:
        """The source to read a tensor from: its values or, if `listed` has a digest of the codes, the codes.

        Raises CheckpointError if a digest is of values that cannot be computed.
        """
        is_of_codes = listed is not None and not listed.digest_dtype
        if self.quantized and fqn in self.quantized.expressions and not is_of_codes:
            problems, weight_of = self.quantized.problems, self.quantized.scheme.weight_of
            if broken := [text for name, text in problems.items() if weight_of(name) == fqn]:
                raise CheckpointError(f"{fqn}: its values cannot be computed: {' '.join(broken[0].split())}")
            if listed and listed.digest_dtype != self.quantized.dtype:
                raise CheckpointError(f"{fqn}: its digest is of {listed.digest_dtype} values, which is not covered")
            return DequantizedSource(reader, self.quantized)
        if listed is not None and listed.digest_dtype:
            raise CheckpointError(f"{fqn}: is listed as quantized, and {HF_CONFIG} does not say how")
        return reader


def check_model(catalog: Catalog, model_from: Place | None) -> tuple[Check, DigestRules]:
    """Whether the tensors are those of the model; and what their digests are of."""
    name = "names and shapes"
    try:
        with native_weights(catalog, model_from=model_from) as weights:
            what = f"{weights.info.family}, {describe_size(weights.info.args)}, {weights.naming} names"
            if weights.quantized:
                what += f", {len(weights.quantized.expressions):,} weights in {weights.quantized.scheme}"
            return Check(name, "ok", what), _digest_rules(catalog, model_from)
    except UnsupportedError as error:
        return Check(name, "not possible", error.message), DigestRules()
    except CheckpointError as error:
        is_known = bool(model_from) or describes_model(catalog.root)
        check = Check(name, "failed" if is_known else "not possible", error.message)
        return check, _digest_rules(catalog, model_from)


def _digest_rules(catalog: Catalog, model_from: Place | None) -> DigestRules:
    """The rules of the model's tensors, also if some are missing or wrong."""
    try:
        info = find_model_info(catalog, model_part(catalog), model_from=model_from)
        if num_layers(info.args) > len(catalog.tensors):  # no names are made for billions of layers
            return DigestRules()
        family, quantized = get_family(info.family), quantized_tensors(catalog, info)
        naming = naming_of(catalog, family, info.args)
        found = num_mtp_layers(catalog.tensors, family, naming, info.args)
        return DigestRules(native_row_numbers(replace(info, args=with_mtp(info.args, found)), naming), quantized)
    except TitanError:
        return DigestRules()


def check_items(catalog: Catalog, *, remark: str = f"there is no {MANIFEST}") -> Check:
    """Compare each record with the CRC32 that torch writes and never checks."""
    problems, unread = list[str](), list[str]()
    num_summed = num_unsummed = 0
    with CatalogReader(catalog) as reader:
        for fqn in catalog.tensors:
            chunks = catalog.all_chunks(fqn)
            try:
                problems += reader.record_problems(fqn)
                absent = sum(_carries_none(reader, fqn, chunk) for chunk in chunks)
            except UnsupportedError as error:  # not damaged: its bytes are compared, and not understood
                if any(chunk.item is None for chunk in catalog.tensors[fqn].chunks):
                    problems.append(error.message)
                    continue
                problems += reader.unread_problems(fqn)
                unread.append(error.message)
                num_summed += len(chunks)
                continue
            except CheckpointError as error:
                problems.append(error.message)
                continue
            num_unsummed += absent
            num_summed += len(chunks) - absent
        for fqn in catalog.items:
            problems += reader.blob_problems(fqn)
    num_summed += len(catalog.items)
    detail = f"{num_summed:,} items against the CRC32 that each carries ({remark})"
    if num_unsummed and not problems:
        unchecked = f"{num_unsummed:,} items carry no CRC32 and could not be checked"
        return Check(
            "files", "warning" if num_summed else "not possible", detail if num_summed else unchecked, (unchecked,)
        )
    if unread and not problems:
        return Check("files", "warning", f"{detail}; {len(unread):,} hold what titan does not read", tuple(unread))
    return judge("files", detail, problems)


def check_downloaded(folder: Path, names: Sequence[str] | None = None) -> list[Check]:
    """Compare the files at the top of a folder, or `names`, with the checksums that a download from the hub recorded.

    [] if nothing is recorded.
    """
    recorded = {name: record for name, record in recorded_files(folder).items() if "/" not in name}
    if names is not None:
        recorded = {name: record for name, record in recorded.items() if name in names}
    if not recorded:
        return []
    refuse_links_out(folder, [folder / name for name in recorded if exists(folder / name)])
    whole = in_threads([partial(has_content, folder / name, record.etag) for name, record in recorded.items()])
    bad = [name for name, is_whole in zip(recorded, whole, strict=True) if not is_whole]
    present = {name for name in bad if exists(folder / name)}
    problems = [
        f"{name}: " + ("its bytes are not those of the hub's checksum" if name in present else "missing")
        for name in bad
    ]
    if problems:
        again = fetch_again(folder)
        problems += [again["hint"], *again["tries"]]
    return [judge("files", f"{len(recorded):,} files against the checksums of the hub", problems)]


def _carries_none(reader: CatalogReader, fqn: str, chunk: Any) -> bool:
    chunk = reader.located(fqn, chunk)
    return chunk.crc32 is None and chunk.record is not None and chunk.record[1] > 0


@dataclass(frozen=True, slots=True)
class TensorSums:
    """Digests and problems of the tensors of a checkpoint. `non_finite`: tensor → number of NaN and infinite values."""

    entries: dict[str, TensorSum]
    non_finite: dict[str, int]
    damaged: list[str]  # why a tensor could not be read
    unsupported: list[str]


def read_tensors(
    catalog: Catalog, rules: DigestRules, listed: Mapping[str, TensorSum], advance: Callable[[int], None]
) -> TensorSums:
    """Read every tensor as a reader would. `listed`: what the manifest says of their digests."""
    sums = TensorSums({}, {}, [], [])
    with CatalogReader(catalog) as reader:
        for fqn, info in reader.tensors.items():
            try:
                source = rules.source_for(reader, fqn, listed.get(fqn))
                digest, count = _read_through(source, fqn, rules.native_rows, advance)
            except UnsupportedError as error:
                sums.unsupported.append(error.message)
                continue
            except CheckpointError as error:
                sums.damaged.append(error.message)
                continue
            values = source.tensors[fqn]
            dtype = values.dtype if values.dtype != info.dtype else ""
            shape = values.shape if values.shape != info.shape else ()
            sums.entries[fqn] = TensorSum(info.dtype, info.shape, digest, dtype, shape)
            if count:
                sums.non_finite[fqn] = count
    return sums


def changed_tensors(old: Mapping[str, TensorSum], new: Mapping[str, TensorSum]) -> dict[str, str]:
    """Tensor → how it differs. Values of tensors without a digest are not compared."""
    changed = {fqn: "gone" for fqn in old if fqn not in new}
    for fqn, entry in new.items():
        if (was := old.get(fqn)) is None:
            changed[fqn] = "new"
        elif (was.dtype, was.shape) != (entry.dtype, entry.shape):
            changed[fqn] = f"{entry.dtype} {list(entry.shape)} instead of {was.dtype} {list(was.shape)}"
        elif was.digest and was.digest != entry.digest:
            changed[fqn] = "its values have changed (digest)"
    return changed


def _read_through(
    source: TensorSource, fqn: str, native_rows: RowNumbers | None, advance: Callable[[int], None]
) -> tuple[str, int]:
    """(digest, number of values that are not finite) of a tensor, read block by block."""
    info, num_non_finite = source.tensors[fqn], 0
    digest = TensorDigest(info.dtype, info.shape)
    for boxes in whole_row_units(info.shape, itemsize(info.dtype), BLOCK_BYTES):
        for box in boxes:
            array = source.read(fqn, box)
            num_non_finite += count_non_finite(array, info.dtype)
            rows = digest.row_numbers(box)
            digest.update(box, array, rows=native_rows(fqn, rows) if native_rows else rows)
            advance(array.nbytes)
    return digest.hexdigest(), num_non_finite


def judge(name: str, detail: str, problems: list[str]) -> Check:
    return Check(name, "failed" if problems else "ok", detail, tuple(problems))
