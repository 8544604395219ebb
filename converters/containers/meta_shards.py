"""Open an original Meta release as a catalog: `consolidated.NN.pth`, one file per model-parallel rank, joined.

Column-parallel weights are cut along dim 0, row-parallel ones along dim 1, norms are in every file; Llama 3 cuts the
embedding along dim 0, Llama 1 and 2 along dim 1. The cuts follow from comparing the shapes with params.json, the order
of the shards from the numbers in their names.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import PurePath
from typing import Any

from converters.common.box import Box
from converters.common.errors import CheckpointError, TitanError, list_offenders
from converters.common.names import META_PARAMS, META_SHARD
from converters.containers import torch_file
from converters.containers.base import Container, Listing, name_some
from converters.containers.sniff import refuse_foreign_files
from converters.families.args import DecoderArgs
from converters.families.parameters import EMBEDDING, OUTPUT, Parameter, Role
from converters.families.registry import read_meta_params
from converters.naming.meta_names import as_loaded, meta_parameters
from converters.naming.namings import drop_reason
from converters.store.base import Store, read_bytes
from converters.store.json_file import read_json
from converters.views.catalog import Catalog, Chunk, TensorEntry

_VOCABULARY = {EMBEDDING, OUTPUT}  # params.json of Llama 1 and 2 does not have its size
_STATE = "._extra_state"
_ROOT = re.compile(r"consolidated\.(\d+)")  # the folder in the zip of consolidated.01.pth, as torch.save names it


def read_catalog(store: Store) -> Catalog:
    """The catalog of a folder of shards; the chunks of a tensor are in all of them.

    Raises CheckpointError with all offenders: missing or misnamed files, shards that differ in names, shapes or
    dtypes, and shapes that params.json does not explain. Copies are listed in `Catalog.copies`, not compared.
    """
    files = _shard_files(store)
    if META_PARAMS not in store.names():
        raise CheckpointError(
            f"{store.location}: {META_PARAMS} is missing", hint="an original release has it next to the weights"
        )
    shards = _without_states(store, _open_all(store, files))
    _require_own_names(store, files)
    shards = _as_loaded(store, shards)
    if len(files) == 1:
        _require_whole(store, files, shards[0])
        shards[0].container = "meta"
        return shards[0]
    of_ranks = _of_ranks(store, shards)
    _require_alike(store, files, shards, of_ranks)
    return _join(store, files, shards, of_ranks)


def _shard_files(store: Store) -> list[str]:
    """The names consolidated.00.pth, 01, 02 …; none may be missing."""
    files = [name for name in store.names() if fnmatch(name, "consolidated.*.pth")]
    numbers = [int(m.group(1)) for name in files if (m := re.fullmatch(r"consolidated\.(\d{2,3})\.pth", name))]
    wanted = [META_SHARD.format(index=index) for index in range(max(numbers, default=0) + 1)]
    problems = [f"{name}: missing" for name in wanted if name not in files]
    problems += [f"{name}: not the name of a shard" for name in files if name not in wanted]
    if problems:
        raise CheckpointError(
            f"{store.location}: the shards are not {META_SHARD.format(index=0)}, {META_SHARD.format(index=1)} and so "
            f"on:{list_offenders(problems)}",
            hint=f"found: {', '.join(files[:16])}",
        )
    return wanted


def _open_all(store: Store, files: Sequence[str]) -> list[Catalog]:
    shards, errors = [], []
    for file in files:
        try:
            shards.append(torch_file.read_catalog(store, file))
        except TitanError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise CheckpointError(
            f"{store.location}: {len(errors)} shards cannot be opened:" + list_offenders([e.message for e in errors]),
            hint=errors[0].hint,
        )
    return shards


def _without_states(store: Store, shards: list[Catalog]) -> list[Catalog]:
    """The shards without the states of float8 kernels, which are bytes in Llama 4's files; a note says so."""
    for shard in shards:
        states = [name for name in shard.values if name.endswith(_STATE)]
        shard.values = {name: value for name, value in shard.values.items() if name not in states}
        if states:
            shard.unread[f"{_STATE} of {len(states)} modules"] = "of float8 kernels, which Meta's code does not load"
    return shards


def _as_loaded(store: Store, shards: list[Catalog]) -> list[Catalog]:
    """The shards with the tensors that Meta's code makes of them as it loads them."""
    params = read_json(store.local([META_PARAMS]) / META_PARAMS)
    try:
        family, args = read_meta_params(params, _vocabulary_shapes(params, shards[0], len(shards)))
    except TitanError as error:
        if len(shards) > 1 and "moe_args" in params:  # shards of a release that is refused may differ in other ways
            raise type(error)(f"{store.location}: {error.message}", hint=error.hint, tries=error.tries) from error
        return shards  # reported when they are joined, or the model is read
    if args.num_layers > len(shards[0].tensors):
        return shards
    stored = family.meta.stored(args) if family.meta else []
    return [as_loaded(shard, stored) for shard in shards] if stored else shards


def _require_own_names(store: Store, files: Sequence[str]) -> None:
    """Raise CheckpointError for renamed shards: torch.save writes a file's name into it (other writers do not)."""
    renamed = []
    for number, file in enumerate(files):
        start = read_bytes(store, file, 0, 128)  # the first entry's header, which was checked when the zip was opened
        root = start[30 : 30 + int.from_bytes(start[26:28], "little")].decode(errors="replace").partition("/")[0]
        if (match := _ROOT.fullmatch(root)) and int(match.group(1)) != number:
            renamed.append(f"{file}: was written as {root}.pth")
    if renamed:
        raise CheckpointError(
            f"{store.location}: renamed shards:" + list_offenders(renamed),
            hint="in another order they are another model; restore their names",
        )


def _of_ranks(store: Store, shards: Sequence[Catalog]) -> dict[str, TensorEntry]:
    """The dropped tensors that each rank has its own of, such as parts of a vision encoder, as one shard has them."""
    params = read_json(store.local([META_PARAMS]) / META_PARAMS)
    try:
        family, _ = read_meta_params(params, _vocabulary_shapes(params, shards[0], len(shards)))
    except TitanError:
        return {}  # reported when they are joined
    naming = family.namings["meta"]
    own = replace(naming, drops=tuple(drop for drop in naming.drops if drop.is_of_rank))
    found: dict[str, TensorEntry] = {}
    for shard in shards:
        found |= {n: e for n, e in shard.tensors.items() if n not in found and drop_reason(n, own)}
    return found


def _require_alike(
    store: Store, files: Sequence[str], shards: Sequence[Catalog], of_ranks: Mapping[str, TensorEntry]
) -> None:
    """Raise CheckpointError unless all shards have the same names, shapes and dtypes, but for those `of_ranks`."""
    problems = []
    names = dict.fromkeys(fqn for shard in shards for fqn in shard.names)
    for fqn in (fqn for fqn in names if fqn not in of_ranks):
        descriptions = [_describe(shard, fqn) for shard in shards]
        usual = Counter(descriptions).most_common(1)[0][0]
        problems += [
            f"{fqn}: {text} in {file}, {usual} in others"
            for file, text in zip(files, descriptions, strict=True)
            if text != usual
        ]
    if problems:
        raise CheckpointError(
            f"{store.location}: the shards have different contents:" + list_offenders(problems),
            hint="shards of one model hold the same names, shapes and dtypes",
        )


def _describe(shard: Catalog, fqn: str) -> str:
    entry = shard.tensors.get(fqn)
    if entry is not None:
        return f"{entry.dtype} {list(entry.shape)}"
    return f"{shard.values[fqn].plain!r:.60}" if fqn in shard.values else "nothing"


def _join(
    store: Store, files: Sequence[str], shards: Sequence[Catalog], of_ranks: Mapping[str, TensorEntry]
) -> Catalog:
    first, count = shards[0], len(shards)
    args, parameters, dropped = _model(store, first, count)
    catalog = Catalog(store, "meta", {}, planner_data=dict(first.planner_data), values=dict(first.values))
    catalog.unread = dict(first.unread)
    problems, matching_counts, cut = [], set(), []
    catalog.tensors |= of_ranks
    chunks_of_ranks = {
        fqn: [c for shard in shards if fqn in shard.tensors for c in shard.tensors[fqn].chunks] for fqn in of_ranks
    }
    catalog.of_ranks = {fqn: tuple(chunks[1:]) for fqn, chunks in chunks_of_ranks.items()}
    for fqn, entry in first.tensors.items():
        if fqn in of_ranks:
            continue  # dropped, so nothing of it is read
        chunks = [shard.tensors[fqn].chunks[0] for shard in shards]
        parameter = parameters.get(fqn)
        if fqn in dropped or (parameter and parameter.tp_dim is None and parameter.shape == entry.shape):
            catalog.tensors[fqn] = entry
            catalog.copies[fqn] = tuple(chunks[1:])
        elif parameter is None:  # unknown, so the parts cannot be joined: the ledger will refuse each
            for file, shard in zip(files, shards, strict=True):
                catalog.tensors[f"{fqn} in {file}"] = replace(shard.tensors[fqn], fqn=f"{fqn} in {file}")
        elif (dim := _cut_dim(parameter, entry.shape, count)) is not None:
            catalog.tensors[fqn] = TensorEntry(fqn, entry.dtype, parameter.shape, _placed(chunks, dim))
            cut.append(fqn)
        elif repeats := _repeats(parameter, entry.shape, count, args):
            whole = _placed(chunks[::repeats], 0)
            catalog.tensors[fqn] = TensorEntry(fqn, entry.dtype, parameter.shape, whole)
            copies = [(whole[i // repeats].box, chunk) for i, chunk in enumerate(chunks) if i % repeats]
            catalog.copies[fqn] = tuple(replace(chunk, box=box) for box, chunk in copies)
        else:
            problems.append(f"{fqn}: {list(entry.shape)} in each shard, {list(parameter.shape)} in all")
            matching_counts.add(_right_count(parameter, entry.shape))
    if problems:
        if _VOCABULARY.issuperset(cut):  # no other weight matches
            _require_count(store, files, matching_counts)
        raise CheckpointError(
            f"{store.location}: {count} shards do not make the model of {META_PARAMS}:" + list_offenders(problems),
            hint="they are of another model, or there is one too many",
        )
    _require_no_doubles(store, files, shards, cut)
    return catalog


def _model(store: Store, shard: Catalog, count: int) -> tuple[DecoderArgs, Mapping[str, Parameter], set[str]]:
    """Numbers and full shapes of params.json (the vocabulary's size may be that of the weights), and dropped names.

    Nothing else is taken from the weights: half of the shards would make a consistent half of a model.
    """
    params = read_json(store.local([META_PARAMS]) / META_PARAMS)
    shapes = _vocabulary_shapes(params, shard, count)
    try:
        family, args = read_meta_params(params, shapes)
    except TitanError as error:
        raise type(error)(f"{store.location}: {error.message}", hint=error.hint, tries=error.tries) from None
    if args.num_layers > len(shard.tensors):  # checked before names are made for billions of layers
        raise CheckpointError(
            f"{store.location}: {len(shard.tensors)} tensors are too few for {args.num_layers:,} layers"
        )
    dropped = {fqn for fqn in shard.tensors if drop_reason(fqn, family.namings["meta"])}
    return args, meta_parameters(family, args), dropped


def _vocabulary_shapes(params: Mapping[str, Any], shard: Catalog, count: int) -> dict[str, tuple[int, ...]]:
    """The shapes that say the vocabulary's size, if params.json does not; of the whole embedding."""
    shapes = {fqn: entry.shape for fqn, entry in shard.tensors.items() if fqn in _VOCABULARY}
    embedding = shapes.get(EMBEDDING, ())
    inner = params.get("model")
    dim = (inner if isinstance(inner, Mapping) else params).get("dim")
    if len(embedding) == 2 and embedding[1] == dim:
        shapes[EMBEDDING] = (embedding[0] * count, embedding[1])
    return shapes


def _cut_dim(parameter: Parameter, shape: tuple[int, ...], count: int) -> int | None:
    """The dim along which `count` parts of `shape` make the parameter; None if they do not.

    The embedding's other side is never cut, so no shape fits both of its dims.
    """
    dims = (0, 1) if parameter.role is Role.EMBEDDING else (parameter.tp_dim,)
    for dim in dims:
        if dim is not None and dim < len(shape):
            whole = (*shape[:dim], shape[dim] * count, *shape[dim + 1 :])
            if whole == parameter.shape:
                return dim
    return None


def _repeats(parameter: Parameter, shape: tuple[int, ...], count: int, args: DecoderArgs) -> int:
    """Number of consecutive shards with the same key/value head, if there are fewer heads than shards; else 0.

    A shard has the queries of num_heads / count heads in a row, so the head that it needs is shard · heads // count.
    """
    repeats, rest = divmod(count, args.num_kv_heads)
    one_head = (args.head_dim, *parameter.shape[1:])
    return repeats if parameter.role is Role.KV_COLUMN and shape == one_head and repeats > 1 and not rest else 0


def _placed(chunks: Sequence[Chunk], dim: int) -> tuple[Chunk, ...]:
    """Chunks of equal size, consecutive along `dim`."""
    placed = []
    for number, chunk in enumerate(chunks):
        offsets = [0] * len(chunk.box.sizes)
        offsets[dim] = number * chunk.box.sizes[dim]
        placed.append(replace(chunk, box=Box(tuple(offsets), chunk.box.sizes)))
    return tuple(placed)


def _right_count(parameter: Parameter, shape: tuple[int, ...]) -> int:
    """The number of shards for which this shape would be right; 0 if there is none."""
    for dim in range(len(shape)) if len(shape) == len(parameter.shape) else ():
        if shape[dim] and parameter.shape[dim] % shape[dim] == 0:
            count = parameter.shape[dim] // shape[dim]
            if _cut_dim(parameter, shape, count) == dim:
                return count
    return 0


def _require_count(store: Store, files: Sequence[str], asked: Iterable[int]) -> None:
    """Raise CheckpointError if all shapes match one number of shards, which is not that of the files."""
    counts = {*asked} - {0}
    if len(counts) == 1 and (count := counts.pop()) != len(files):
        wanted = [META_SHARD.format(index=index) for index in range(count)]
        odd = [f"{file}: missing" for file in wanted if file not in files]
        odd += [f"{file}: too many" for file in files if file not in wanted]
        raise CheckpointError(
            f"{store.location}: the weights are cut into {count} shards, and there are {len(files)}:"
            + list_offenders(odd),
            hint=f"their shapes and {META_PARAMS} imply that",
        )


def _require_whole(store: Store, files: Sequence[str], shard: Catalog) -> None:
    """Raise CheckpointError if a single file is one of several shards, by its shapes."""
    try:
        _, parameters, _ = _model(store, shard, 1)
    except TitanError:
        return  # reported when the model is read
    matrices = {fqn: entry.shape for fqn, entry in shard.tensors.items() if fqn in parameters and len(entry.shape) == 2}
    _require_count(store, files, {_right_count(parameters[n], s) for n, s in matrices.items() if n not in _VOCABULARY})


def _require_no_doubles(store: Store, files: Sequence[str], shards: Sequence[Catalog], cut: Sequence[str]) -> None:
    """Raise CheckpointError for copies of a shard under another name, by the CRC32s in the files, if they have them.

    Constant weights (zeros of a test) are equal in every shard, and not copies. Parts of a fused weight differ only in
    where they begin in its record, so that is compared of shards, and does not tell whether weights are constant.
    """
    marks: dict[tuple[Any, ...], str] = {}
    doubles = []
    for file, shard in zip(files, shards, strict=True):
        chunks = [shard.tensors[fqn].chunks[0] for fqn in cut]
        mark = tuple((c.crc32, c.record and c.byte_offset - c.record[0], c.box.sizes) for c in chunks)
        records = {(c.crc32, c.record and c.record[1]) for c in chunks}
        if any(crc is None for crc, _ in records) or len(records) == len({size for _, size in records}):
            continue
        if (first := marks.setdefault(mark, file)) != file:
            doubles.append(f"{file}: the same content as {first}")
    if doubles:
        raise CheckpointError(f"{store.location}: a shard is repeated:" + list_offenders(doubles))


def meta_shards(names: Iterable[str]) -> tuple[str, ...]:
    """The files with names like Meta's shards, sorted."""
    return tuple(sorted(name for name in names if PurePath(name).match("consolidated.*.pth")))


def _open_folder(files: Listing) -> Catalog:
    refuse_foreign_files(files.store, meta_shards(files.names))
    return read_catalog(files.store)


META = Container(
    name="meta",
    called="an original Meta release",
    title="Meta's original format",
    suffixes=(),  # those of torch files
    find=lambda files: name_some(meta_shards(files.names)),
    open_folder=_open_folder,
    marks=meta_shards,
    replaceable=(META_SHARD.format(index=0),),
    has_parts_of_ranks=True,
    keeps_tokenizer_model=True,
)
