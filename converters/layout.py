"""The box of each tensor that a rank of a mesh holds: pipeline stages, then TP and EP, then FSDP inside. Torch-free.

Tests compare this with real DTensor placements (FSDP over TP on one dim is torch's `_StridedShard`) and with the
stage split of torchtitan: a job of that mesh reads a checkpoint cut here chunk by chunk, no byte twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import islice, product
from math import ceil, gcd, prod
from typing import Any

from converters.catalog import Box, TensorInfo
from converters.collector import collector_paused
from converters.dtypes import itemsize
from converters.errors import ConfigError, list_offenders
from converters.families.base import Experts, Family, ModelArgs, Parameter
from converters.sizes import GIB, MIB

# A stock reader loads whole chunks, so a chunk bounds its memory; each costs an item header (~1.5 KB).
MAX_CHUNK_BYTES = 256 * MIB
SEED_CHUNK_BYTES = 64 * MIB  # where the readers' mesh is unknown: a rank reads little that it does not need
DISTCP_FILE = "__{rank}_0.distcp"
MAX_RANKS = 131_072  # a limit for loops over ranks; no job has been larger
MAX_CHUNKS = 4_000_000  # of a model's weights; 405B on 512 ranks has 470,000
_MANY_CHUNKS, _FEW_ELEMENTS = 500_000, 16_384  # chunks that small cost more to list than to store
_NUM_NEAREST = 12  # degrees that an error lists
_READER_BYTES_PER_CHUNK = 1900  # in stock DCP's list

Files = dict[str, list[tuple[str, Box]]]  # file name → the boxes in it, in order


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Degrees of a device mesh, outermost axis first. Rank order is row-major in this order, as in torchtitan.

    `ep` and `etp` add no ranks: experts see the dp_shard × cp × tp ranks of a replica as efsdp × ep × etp.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1  # 1 or tp; without expert parallelism, tensor parallelism slices experts as other weights

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def fsdp(self) -> int:
        """Ranks that parameters are sharded over: context parallelism shards them too."""
        return self.dp_shard * self.cp

    @property
    def expert_tp(self) -> int:
        """Ranks that share the columns of an expert."""
        return self.tp if self.ep == 1 else self.etp

    @property
    def efsdp(self) -> int:
        """Ranks that experts are sharded over, inside of what expert parallelism leaves on a rank."""
        return self.fsdp * self.tp // (self.ep * self.expert_tp)

    @property
    def batch(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def of_experts(self) -> str:
        """How the ranks of a replica share experts: `efsdp 2 × ep 8 × etp 1`."""
        return f"efsdp {self.efsdp} × ep {self.ep} × etp {self.expert_tp}"

    def coordinates(self, rank: int) -> "MeshShape":
        """The coordinate of `rank` on each axis, from 0."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        index = (found["dp_shard"] * self.cp + found["cp"]) * self.tp + found["tp"]
        found["etp"], found["ep"] = index % self.expert_tp, index // self.expert_tp % self.ep
        return MeshShape(**found)

    def __str__(self) -> str:
        return ",".join(f"{a}={getattr(self, a)}" for a in DEGREES if getattr(self, a) > 1) or "dp_shard=1"

    @staticmethod
    def parse(text: str) -> "MeshShape":
        """Parse `dp_shard=64,tp=8,pp=4`. Raises ConfigError with every problem."""
        degrees: dict[str, int] = {}
        problems = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            axis, _, value = (p.strip() for p in part.partition("="))
            if axis not in DEGREES:
                near = get_close_matches(axis, DEGREES, 1)
                problems.append(f"{part!r}: no axis {axis!r}" + (f", did you mean {near[0]}?" if near else ""))
            elif len(value) > len(str(MAX_RANKS)) and value.isdecimal():
                problems.append(f"{part[:40]!r}: more than {MAX_RANKS:,} ranks")
            elif not value.isdecimal() or int(value) < 1:
                problems.append(f"{part!r}: a degree is a whole number from 1")
            elif axis in degrees:
                problems.append(f"{part!r}: {axis} is given twice")
            else:
                degrees[axis] = int(value)
        if not degrees and not problems:
            problems.append("no axis is given")
        mesh = MeshShape(**degrees)
        if not problems and mesh.world_size > MAX_RANKS:
            problems.append(f"{mesh.world_size:,} ranks; the most is {MAX_RANKS:,}")
        if problems:
            raise ConfigError(
                f"cannot read the mesh {text[:200]!r}:" + list_offenders(problems),
                hint=f"axes: {', '.join(DEGREES)}",
                tries=["dp_shard=8", "dp_shard=64,tp=8,pp=4"],
            )
        return mesh


DEGREES = tuple(f.name for f in fields(MeshShape))
AXES = DEGREES[:5]  # those that the ranks are the product of


def split_stages(num_stages: int, num_layers: int, *, first_less: int = 1, last_less: int = 1) -> list[list[str]]:
    """Module names per pipeline stage, as torchtitan splits (generate_llm_fqn_per_model_part).

    The embedding counts as `first_less` layers and norm + output as `last_less`; what does not divide goes to the first
    stages. Raises ConfigError where a stage would be left empty.
    """
    layers = [f"layers.{n}" for n in range(num_layers)]
    if num_stages == 1:
        return [["tok_embeddings", *layers, "norm", "output"]]
    per_stage, extra = divmod(num_layers + first_less + last_less, max(num_stages, 1))
    if num_stages < 1 or per_stage < max(1, first_less, last_less):
        most = (num_layers + first_less + last_less) // max(1, first_less, last_less)
        raise ConfigError(
            f"{num_layers} layers cannot be split into {num_stages} pipeline stages",
            hint=f"embedding counts as {first_less} and output as {last_less} layers; at most {most} stages",
        )
    sizes = [per_stage + (stage < extra) for stage in range(num_stages)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    remaining = iter(layers)
    stages = [list(islice(remaining, size)) for size in sizes]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def uneven_over_tp(args: ModelArgs, tp: int) -> str:
    """Which sizes of the model `tp` does not divide, and the degrees that would: "does not divide …"; "" if none."""
    counts = {
        "attention heads": args.num_heads,
        "key/value heads": args.num_kv_heads,
        "feed-forward columns": args.ffn_hidden,
        "vocabulary entries": args.vocab_size,
    }
    uneven = [f"{count:,} {what}" for what, count in counts.items() if count % tp]
    if not uneven:
        return ""
    common = gcd(*counts.values())
    return f"does not divide {', '.join(uneven)}; possible: {_divisors(common)}"


def check_mesh(mesh: MeshShape, family: Family, args: ModelArgs) -> None:
    """Raise ConfigError with every reason why this model cannot be trained on `mesh`.

    FSDP shards uneven rows; tensor parallelism needs heads and columns that it divides evenly.
    """
    problems = [f"{axis}={getattr(mesh, axis)} {text}" for axis, text in expert_mesh_problems(mesh, family, args)]
    if uneven := uneven_over_tp(args, mesh.tp):
        problems.append(f"tp={mesh.tp} {uneven}")
    try:
        split_stages(mesh.pp, args.num_layers)
    except ConfigError as error:
        problems.append(f"{error.message}; {error.hint}")
    if problems:
        raise ConfigError(f"this model cannot be trained on the mesh {mesh}:" + list_offenders(problems))


def expert_mesh_problems(mesh: MeshShape, family: Family, args: ModelArgs) -> list[tuple[str, str]]:
    """(degree, why it does not fit the model's experts, and what does) for each of tp, ep and etp that does not."""
    mixtures = {b.feed_forward for b in family.blocks(args) if isinstance(b.feed_forward, Experts)}
    if not mixtures:
        named = [degree for degree in ("ep", "etp") if getattr(mesh, degree) > 1]
        return [(degree, "is of experts, and this model has none; possible: 1") for degree in named]
    problems = []
    num, hidden = gcd(*(m.num for m in mixtures)), gcd(*(m.hidden for m in mixtures))
    sliced = "tp" if mesh.ep == 1 else "etp"
    # What comes after a wrong etp is checked as with etp 1, so that no problem follows from another
    if mesh.etp not in (1, mesh.tp):
        problems.append(
            ("etp", f"is neither 1 nor tp ({mesh.tp}); possible: {', '.join(map(str, sorted({1, mesh.tp})))}")
        )
        mesh = replace(mesh, etp=1)
    if hidden % mesh.expert_tp:
        choices = "1" if sliced == "etp" else _divisors(hidden)
        problems.append((sliced, f"does not divide the {hidden:,} columns of an expert; possible: {choices}"))
        mesh = replace(mesh, etp=1)
    shared = gcd(*(m.shared_hidden for m in mixtures))
    if shared % mesh.tp:
        problems.append(
            ("tp", f"does not divide the {shared:,} columns of the shared expert; possible: {_divisors(shared)}")
        )
    if misfit := _misfit_of_ep(mesh, num, hidden, args.dim):
        problems.append(("ep", f"{misfit}; possible: {_fitting_ep(mesh, num, hidden, args.dim)}"))
    return problems


def _misfit_of_ep(mesh: MeshShape, num: int, hidden: int, dim: int) -> str:
    """Why `ep` does not fit `num` experts of `hidden` columns and `dim` outputs; "" if it does. `etp` is 1 or tp."""
    ranks, sharing = (mesh.fsdp * mesh.tp, " × tp") if mesh.etp == 1 else (mesh.fsdp, "")
    counts = ((num, f"{num:,} experts"), (ranks, f"the {ranks:,} ranks of dp_shard × cp{sharing}"))
    if uneven := [what for count, what in counts if count % mesh.ep]:
        return f"does not divide {' and '.join(uneven)}"
    widths = ((hidden // mesh.expert_tp, "columns"), (dim, "outputs")) if cuts_within_experts(num, mesh) else ()
    if uneven := [f"{width:,} {what}" for width, what in widths if width % mesh.efsdp]:
        shared = f"leaves {mesh.efsdp:,} ranks for {num // mesh.ep:,} experts"
        return f"{shared}, and {' and '.join(uneven)} of each do not divide by them"
    return ""


def _fitting_ep(mesh: MeshShape, num: int, hidden: int, dim: int) -> str:
    """The degrees nearest to `ep` that fit, and the least replication with which `ep` itself does, if any."""
    # With ep 1, tp slices experts
    whole = [ep for ep in range(1, num + 1) if num % ep == 0 and (ep > 1 or hidden % mesh.tp == 0)]
    fitting = [ep for ep in whole if not _misfit_of_ep(replace(mesh, ep=ep), num, hidden, dim)]
    nearest = sorted(sorted(fitting, key=lambda ep: abs(ep - mesh.ep))[:_NUM_NEAREST])
    found = [", ".join(map(str, nearest))] if nearest else []
    for times in range(2, mesh.dp_shard + 1):
        dp_shard, rest = divmod(mesh.dp_shard, times)
        other = replace(mesh, dp_shard=dp_shard, dp_replicate=mesh.dp_replicate * times)
        if not rest and not _misfit_of_ep(other, num, hidden, dim):
            found.append(f"dp_replicate={other.dp_replicate} with dp_shard={dp_shard}")
            break
    return ", or ".join(found) or "none with the other degrees"


def _divisors(number: int) -> str:
    return ", ".join([str(n) for n in range(1, min(number, MAX_RANKS) + 1) if number % n == 0][:_NUM_NEAREST])


def cuts_within_experts(num_experts: int, mesh: MeshShape) -> bool:
    """Whether FSDP cuts dim 1 of a stack, as in torchtitan, not dim 0: more ranks share it than there are experts."""
    return mesh.ep > 1 and mesh.efsdp * mesh.ep > num_experts


def ranks_of_stages(num_stages: int, pp: int, *, v_shaped: bool = False) -> tuple[int, ...]:
    """The pipeline rank of each stage: round robin, or V-shaped, where rank 0 holds the first and the last stage."""
    if v_shaped:
        return tuple(min(stage % (2 * pp), 2 * pp - 1 - stage % (2 * pp)) for stage in range(num_stages))
    return tuple(stage % pp for stage in range(num_stages))


def stages_of_rank(pp_rank: int, pp: int, num_stages: int, *, v_shaped: bool = False) -> list[int]:
    """The stages a pipeline rank holds, first to last."""
    ranks = ranks_of_stages(num_stages, pp, v_shaped=v_shaped)
    return [stage for stage, rank in enumerate(ranks) if rank == pp_rank]


def module_of(fqn: str) -> str:
    """The module that pipeline splitting moves: `layers.3` of `layers.3.attention.wq.weight`, `norm` of its weight."""
    head, _, rest = fqn.partition(".")
    return f"{head}.{rest.partition('.')[0]}" if head == "layers" else head


def chunk_bounds(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """(start, length) of a chunk as torch.chunk cuts: ceil(size / num_chunks) rows, the last ones fewer or none."""
    step = ceil(size / num_chunks)
    start = min(index * step, size)
    return start, min(step, size - start)


@dataclass(frozen=True, slots=True)
class Cut:
    """Cuts a dim into `degree` parts; ranks of neighbouring parts are `stride` apart. `dim` None: all have it whole."""

    dim: int | None
    degree: int
    stride: int


def cuts_of(parameter: Parameter, mesh: MeshShape) -> list[Cut]:
    """How a replica's ranks share a parameter, in the order of the cuts: EP and TP first, FSDP inside."""
    if parameter.expert_dim is None or mesh.ep == 1:
        return [Cut(parameter.tp_dim, mesh.tp, 1), Cut(0, mesh.fsdp, mesh.tp)]
    num_experts = parameter.shape[parameter.expert_dim]
    return [
        Cut(parameter.expert_dim, mesh.ep, mesh.etp),
        Cut(parameter.tp_dim, mesh.etp, 1),
        Cut(1 if cuts_within_experts(num_experts, mesh) else 0, mesh.efsdp, mesh.etp * mesh.ep),
    ]


def local_box(parameter: Parameter, mesh: MeshShape, rank: int) -> Box | None:
    """The part of a parameter that `rank` holds within its stage, or None where uneven sharding leaves it without any.

    A 0-dim tensor, and a buffer that is saved but not trained, is whole on every rank. Where TP does not divide dim 0,
    these are FSDP2's shards, although torch 2.13's `_StridedShard` computes others.
    """
    if not parameter.is_trained:
        return Box.whole(parameter.shape)
    cuts = cuts_of(parameter, mesh)
    return _box_at(parameter.shape, cuts, [rank // cut.stride % cut.degree for cut in cuts])


def _box_at(shape: tuple[int, ...], cuts: Sequence[Cut], numbers: Sequence[int]) -> Box | None:
    """The part of these numbers, one for each cut."""
    offsets, sizes = [0] * len(shape), list(shape)
    for cut, number in zip(cuts, numbers, strict=True):
        if cut.dim is not None and sizes:
            start, sizes[cut.dim] = chunk_bounds(sizes[cut.dim], cut.degree, number)
            offsets[cut.dim] += start
    return Box(tuple(offsets), tuple(sizes)) if prod(sizes) or 0 in shape else None


@collector_paused()
def boxes_for_mesh(
    parameters: Sequence[Parameter],
    mesh: MeshShape,
    *,
    itemsizes: Mapping[str, int],
    stages: Sequence[Sequence[str]] | None = None,
    stage_ranks: Sequence[int] | None = None,
) -> Files:
    """The files of a checkpoint as ranks of `mesh` would write it; of several ranks that hold a box, the lowest does.

    `itemsizes`: bytes per element by FQN. `stages`: module names per stage; split_stages's result when None.
    `stage_ranks`: the pipeline rank of each; round robin when None. A tied embedding has one FQN and so belongs to
    the first stage. Raises ConfigError where the mesh would cut the model into more chunks than a `.metadata` can
    reasonably list.
    """
    if stages is None:
        stages = split_stages(mesh.pp, len({p.layer for p in parameters} - {None}))
    if stage_ranks is None:
        stage_ranks = ranks_of_stages(len(stages), mesh.pp)
    pp_rank_of = {module: rank for rank, modules in zip(stage_ranks, stages, strict=True) for module in modules}
    pp_rank_of["mtp_layers"] = stage_ranks[-1]  # which predict from what the last stage computes
    ranks_per_stage = mesh.world_size // mesh.pp
    _reject_tiny_chunks(parameters, mesh)
    # Layers are alike: boxes of one shape are made once and shared. 405B on 512 ranks has 470,000, of which 3,000
    # differ.
    made: dict[tuple[Any, ...], list[tuple[int, Box]]] = {}
    files: dict[int, list[tuple[str, Box]]] = {}
    for parameter in parameters:
        element_bytes = itemsizes[parameter.fqn]
        key = (parameter.shape, *cuts_of(parameter, mesh), element_bytes, parameter.is_trained)
        if key not in made:
            made[key] = list(_boxes_within_stage(parameter, mesh, element_bytes))
        first_rank = pp_rank_of[module_of(parameter.fqn)] * ranks_per_stage
        for rank, box in made[key]:
            files.setdefault(first_rank + rank, []).append((parameter.fqn, box))
    return {DISTCP_FILE.format(rank=rank): files[rank] for rank in sorted(files)}


def _boxes_within_stage(parameter: Parameter, mesh: MeshShape, element_bytes: int) -> Iterator[tuple[int, Box]]:
    """(rank within its stage, box) for every part of a tensor, each once: the lowest rank that holds it writes it."""
    if not parameter.is_trained:
        yield 0, Box.whole(parameter.shape)
        return
    cuts = sorted(cuts_of(parameter, mesh), key=lambda cut: -cut.stride)  # by rank, of the first dp_replicate
    order = cuts_of(parameter, mesh)
    for numbers in product(*(range(_num_parts(cut, parameter.shape)) for cut in cuts)):
        number_of = dict(zip(cuts, numbers, strict=True))
        box = _box_at(parameter.shape, order, [number_of[cut] for cut in order])
        if box is not None:
            rank = sum(number * cut.stride for cut, number in number_of.items())
            yield from ((rank, part) for part in row_blocks(box, element_bytes, MAX_CHUNK_BYTES))


def _num_parts(cut: Cut, shape: tuple[int, ...]) -> int:
    """Of parts that may hold something: ranks beyond the rows hold nothing."""
    if cut.dim is None or not shape:
        return 1
    return min(cut.degree, max(shape[cut.dim], 1))


def _reject_tiny_chunks(parameters: Sequence[Parameter], mesh: MeshShape) -> None:
    """Raise ConfigError for too many small chunks: each costs every reading rank about 2 kB of memory and 15 µs."""
    num_chunks = sum(prod(_num_parts(cut, p.shape) for cut in cuts_of(p, mesh)) for p in parameters)
    elements = sum(prod(p.shape) for p in parameters) // max(1, num_chunks)
    if num_chunks > MAX_CHUNKS or (num_chunks > _MANY_CHUNKS and elements < _FEW_ELEMENTS):
        list_gib = num_chunks * _READER_BYTES_PER_CHUNK / GIB
        raise ConfigError(
            f"the mesh {mesh} would cut this model into {num_chunks:,} chunks of {elements:,} values on average: "
            f"a stock reader would hold {list_gib:.1f} GiB of their list on every rank",
            hint="use a smaller dp_shard together with dp_replicate (HSDP)",
        )


def boxes_for_any_mesh(tensors: Mapping[str, TensorInfo], *, file_bytes: int) -> Files:
    """Row blocks of at most 64 MiB in files of about `file_bytes`, for readers of unknown layout."""
    files: Files = {}
    current: list[tuple[str, Box]] = []
    filled = 0
    for fqn, info in tensors.items():
        size = itemsize(info.dtype)
        for box in row_blocks(Box.whole(info.shape), size, SEED_CHUNK_BYTES):
            if not current or filled + box.num_elements * size > file_bytes:
                current = files.setdefault(DISTCP_FILE.format(rank=len(files)), [])
                filled = 0
            current.append((fqn, box))
            filled += box.num_elements * size
    return files


def boxes_for_num_files(tensors: Mapping[str, TensorInfo], num_files: int) -> Files:
    """Row blocks of at most 64 MiB in exactly `num_files` files of about the same size.

    Raises ConfigError where rows, which stay whole, are too few or too long for so many files.
    """
    total = sum(prod(info.shape) * itemsize(info.dtype) for info in tensors.values())
    held: list[list[tuple[str, Box]]] = [[] for _ in range(num_files)]
    number = filled = 0
    for fqn, info in tensors.items():
        size, row, num_rows = itemsize(info.dtype), 0, info.shape[0] if info.shape else 1
        row_bytes = prod(info.shape[1:]) * size
        if not row_bytes * num_rows:
            held[number].append((fqn, Box.whole(info.shape)))
            continue
        while row < num_rows:
            until = total * (number + 1) // num_files  # where this file ends, in bytes of all tensors
            fitting = max(0, round((until - filled) / row_bytes)) if number < num_files - 1 else num_rows
            rows = min(num_rows - row, fitting)
            if rows:
                part = Box((row, *(0,) * len(info.shape[1:])), (rows, *info.shape[1:])) if info.shape else Box((), ())
                held[number] += [(fqn, block) for block in row_blocks(part, size, SEED_CHUNK_BYTES)]
                row, filled = row + rows, filled + rows * row_bytes
            if rows == fitting and number < num_files - 1:
                number += 1
    if not all(held):
        raise ConfigError(
            f"{total:,} bytes cannot be divided into {num_files:,} files",
            hint=f"a row is not split between files, so {num_files - sum(map(bool, held)):,} would be empty",
        )
    return {DISTCP_FILE.format(rank=rank): boxes for rank, boxes in enumerate(held)}


def row_blocks(box: Box, element_bytes: int, max_bytes: int) -> Iterator[Box]:
    """`box` cut along dim 0 into parts of at most `max_bytes` each (one row where a row is larger)."""
    if not box.sizes or box.num_elements * element_bytes <= max_bytes:
        yield box
        return
    rows = max(1, max_bytes // (prod(box.sizes[1:]) * element_bytes))
    for start in range(0, box.sizes[0], rows):
        size = min(rows, box.sizes[0] - start)
        yield Box((box.offsets[0] + start, *box.offsets[1:]), (size, *box.sizes[1:]))
