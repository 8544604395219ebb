"""Attention with masks (documents, windows, chunks, sinks): a config's settings, and what is refused. Torch-free."""

from converters.families.args import ModelArgs
from converters.families.base import Family, FlavorAttention
from converters.families.blocks import GroupedQuery
from converters.layout.mesh_shape import MeshShape
from trainer.config.sections import Config
from trainer.data.kinds import C4
from trainer.data.sample import DocumentRules
from trainer.parallel.stages import SPLIT_BACKWARD_SCHEDULES
from trainer.ranks.machine import Device

_BLOCK_CAUSAL = "block_causal"


def document_rules(config: Config, family: Family) -> DocumentRules:
    """The mask and the packing of a run, without the token that ends a document."""
    mask = config.training.document_mask
    if mask is None:
        mask = "offsets" if _flavor(config, family).attn_mask_type == _BLOCK_CAUSAL else "none"
    return DocumentRules(mask, config.training.packing)


def attention_kernel(config: Config, family: Family) -> str:
    """The kernel of attention within documents on a GPU: flex or varlen."""
    of_flavor = _flavor(config, family).attn_type
    return config.model.attn_type or ("varlen" if of_flavor == "varlen" else "flex")


def needs_masks(family: Family, args: ModelArgs) -> bool:
    """Whether layers have windows, chunks or sinks, which kernels of attention within documents compute."""
    return any(
        isinstance(kind, GroupedQuery) and kind.needs_mask
        for kind in (block.attention for block in family.blocks(args))
    )


def masked_machine_problems(config: Config, family: Family, device: Device) -> list[str]:
    """varlen's kernel is flash attention, which has no fp32; FlexAttention is Triton code."""
    has_documents = document_rules(config, family).mask != "none"
    needs_flex = needs_masks(family, family.flavors[config.model.flavor])
    if device.type != "cuda" or not (has_documents or needs_flex):
        return []
    if attention_kernel(config, family) == "varlen":
        if config.training.mixed_precision_param != "float32":
            return []
        return ["attention within documents by varlen computes in bfloat16; nearest: model.attn_type = flex"]
    from torch.utils._triton import has_triton

    if has_triton():
        return []
    nearest = "install triton, which torch's wheels for CUDA require" if needs_flex else "attn_type = varlen"
    return [f"FlexAttention needs Triton, which is not installed; nearest: {nearest}"]


def document_problems(
    config: Config, family: Family, args: ModelArgs, dims: MeshShape, *, takes_documents: bool
) -> list[str]:
    """Unsupported combinations. `takes_documents`: the model's forward does."""
    rules, kernel = document_rules(config, family), attention_kernel(config, family)
    has_kinds = needs_masks(family, args)
    mask = f"attention within documents (training.document_mask = {rules.mask})"
    if rules.mask == "none":
        mask = f"the attention of {family.name}, which has windows, chunks or sinks,"
    schedule = config.parallelism.pipeline_parallel_schedule
    problems = []
    if rules.packing == "best_fit" and rules.mask != "offsets":
        problems.append(
            f"training.packing = best_fit joins whole documents, and training.document_mask is {rules.mask}; nearest:"
            " training.document_mask = offsets, or packing = concatenated"
        )
    if rules.packing == "best_fit" and config.training.dataset == C4:
        problems.append(
            "training.packing = best_fit chooses among all documents, and c4 is streamed; nearest: concatenated, or"
            " dataset = tokens, an index that `titan data prepare` makes of C4's files"
        )
    if has_kinds and kernel == "varlen":
        problems.append(
            f"varlen's kernel computes no windows, chunks or sinks, which {family.name} has; nearest: model.attn_type ="
            " flex"
        )
    elif rules.mask == "none" and config.model.attn_type and not has_kinds:
        problems.append(
            f"model.attn_type = {kernel} is a kernel of attention within documents, and training.document_mask is none;"
            " nearest: training.document_mask = offsets, or no model.attn_type"
        )
    if rules.mask == "none" and not has_kinds:
        return problems
    if rules.mask != "none" and not takes_documents:
        problems.append(
            f"{mask}: the model of family {family.name} does not take documents (TrainerFamily.takes_documents);"
            " nearest: training.document_mask = none"
        )
    if kernel == "varlen" and dims.cp > 1 and not has_kinds:
        problems.append(
            f"{mask} by varlen's kernel needs whole sequences, and context parallelism splits them; nearest:"
            " model.attn_type = flex"
        )
    if kernel == "flex" and dims.pp > 1 and schedule in SPLIT_BACKWARD_SCHEDULES:
        problems.append(
            f"{mask} by FlexAttention is compiled, and schedule {schedule} splits the backward pass, which torch does"
            " not support in compiled code (pytorch#161904); nearest: schedule Interleaved1F1B"
            + ("" if has_kinds else ", or model.attn_type = varlen")
        )
    return problems


def _flavor(config: Config, family: Family) -> FlavorAttention:
    return family.attention_of.get(config.model.flavor, FlavorAttention())
