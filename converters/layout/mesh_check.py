"""Why a model cannot be trained on a mesh, and the degrees that would fit."""

from dataclasses import replace
from math import gcd

from converters.common.errors import ConfigError, list_offenders
from converters.families.args import DecoderArgs, ModelArgs, decoder_args
from converters.families.base import Family
from converters.families.blocks import Experts
from converters.layout.layout import cuts_within_experts
from converters.layout.mesh_shape import MAX_RANKS, MeshShape
from converters.layout.stages import split_stages

_NUM_NEAREST = 12  # degrees that an error lists


def check_mesh(mesh: MeshShape, family: Family, args: ModelArgs) -> None:
    """Raise ConfigError with every reason why this model cannot be trained on `mesh`.

    FSDP shards uneven rows; tensor parallelism needs heads and columns that it divides evenly.
    """
    problems = [f"{axis}={getattr(mesh, axis)} {text}" for axis, text in expert_mesh_problems(mesh, family, args)]
    if uneven := uneven_over_tp(family, args, mesh.tp):
        problems.append(f"tp={mesh.tp} {uneven}")
    try:
        split_stages(mesh.pp, family.units(args))
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
    problems, dim = [], decoder_args(args).dim
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
    if misfit := _misfit_of_ep(mesh, num, hidden, dim):
        problems.append(("ep", f"{misfit}; possible: {_fitting_ep(mesh, num, hidden, dim)}"))
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
    suggestions = [", ".join(map(str, nearest))] if nearest else []
    for times in range(2, mesh.dp_shard + 1):
        dp_shard, remainder = divmod(mesh.dp_shard, times)
        replicated = replace(mesh, dp_shard=dp_shard, dp_replicate=mesh.dp_replicate * times)
        if not remainder and not _misfit_of_ep(replicated, num, hidden, dim):
            suggestions.append(f"dp_replicate={replicated.dp_replicate} with dp_shard={dp_shard}")
            break
    return ", or ".join(suggestions) or "none with the other degrees"


def uneven_over_tp(family: Family, args: ModelArgs, tp: int) -> str:
    """The sizes of the model that `tp` does not divide, and the degrees that would: "does not divide …"; "" if none."""
    if isinstance(args, DecoderArgs):
        counts = {
            "attention heads": args.num_heads,
            "key/value heads": args.num_kv_heads,
            "feed-forward columns": args.ffn_hidden,
            "vocabulary entries": args.vocab_size,
        }
    else:
        counts = {f"features of {p.fqn}": p.shape[p.tp_dim] for p in family.parameters(args) if p.tp_dim is not None}
    uneven = [f"{count:,} {what}" for what, count in counts.items() if count % tp]
    if not uneven:
        return ""
    common = gcd(*counts.values())
    return f"does not divide {', '.join(uneven)}; possible: {_divisors(common)}"


def _divisors(number: int) -> str:
    return ", ".join([str(n) for n in range(1, min(number, MAX_RANKS) + 1) if number % n == 0][:_NUM_NEAREST])
