"""The degrees of a device mesh."""

from dataclasses import dataclass, fields
from difflib import get_close_matches

from converters.common.errors import ConfigError, list_offenders

MAX_RANKS = 131_072  # a limit for loops over ranks; no job has been larger


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
        """The degrees by which the ranks of a replica share experts: `efsdp 2 × ep 8 × etp 1`."""
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
