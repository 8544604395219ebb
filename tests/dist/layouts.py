"""The layouts in which training must equal one rank: one table of degrees, schedules and options.

Each trains one of the debug models: grouped-query attention, or tied embeddings; the main ones both, in the slow set.
"""

from tests.dist.training import Layout

ONE_RANK = Layout("one rank")
GQA, TIED = "debug_gqa", "debug_tied"
BIASED, QWEN_BIASED = "llama3_biased/debug_gqa", "qwen3_biased/debug_gqa"
QWEN_GQA, QWEN_TIED = "qwen3/debug_gqa", "qwen3/debug_tied"
GEMMA = "gemma3/debug"
PP, TP, CP = "pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"
REPLICAS = "data_parallel_replicate_degree"
EP, ETP = "expert_parallel_degree", "expert_tensor_parallel_degree"
SCHEDULE, MICROBATCH = "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"
LAYERS_PER_STAGE = "pipeline_parallel_layers_per_stage"
FIRST_LESS, LAST_LESS = "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers"
EVEN = {FIRST_LESS: 0, LAST_LESS: 0}
EXPLICIT = (("tok_embeddings", "layers.0"), ("layers.1", "layers.2", "layers.3", "norm", "output"))
OP, FULL, EVERY_2ND = (
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "full"},
    {"mode": "selective", "selective_ac_option": "2"},
)
AOT_EAGER = {"enable": True, "backend": "aot_eager"}
# the backend that cuts graphs as inductor does, by the budget
BUDGET = {
    "compile": {"enable": True, "backend": "aot_eager_decomp_partition"},
    "activation_checkpoint": {"mode": "memory_budget", "memory_budget": 0.3},
}


def _pipe(name: str, ranks: int = 2, **keys) -> Layout:
    """A pipeline of two ranks; the others of `ranks` shard."""
    sections = keys.pop("sections", {})
    return Layout(name, ranks, {PP: 2, MICROBATCH: 2} | keys, sections=sections)


MAIN = (
    Layout("fsdp 2", 2),
    Layout("tp 2", 2, {TP: 2}),
    Layout("cp 2", 2, {CP: 2}),
    Layout("pp 2", 2, {PP: 2}),
)
FSDP_TP_PP = Layout("fsdp 2 tp 2 pp 2", 8, {TP: 2, PP: 2, MICROBATCH: 2})
CASES = [
    *zip(MAIN, (GQA, TIED, GQA, TIED), strict=True),
    # each axis; replicas alone are DDP
    (Layout("replicas 2", 2, {REPLICAS: 2}), TIED),
    # pairs of axes; TP in a pipeline is the last one's, FSDP in one is what always reshards
    (Layout("hsdp 2x2", 4, {REPLICAS: 2}), GQA),
    (Layout("fsdp 2 tp 2", 4, {TP: 2}), TIED),
    # each schedule; 1F1B is every other pipeline's
    (_pipe("GPipe, microbatches of 4", **{SCHEDULE: "GPipe", MICROBATCH: 4}), GQA),
    (_pipe("Interleaved1F1B fsdp 2", 4, **{SCHEDULE: "Interleaved1F1B"}), TIED),
    (_pipe("ZBVZeroBubble", **{SCHEDULE: "ZBVZeroBubble", MICROBATCH: 1}), TIED),
    # each way to recompute
    (Layout("full recomputation", 2, sections={"activation_checkpoint": FULL}), TIED),
    # when FSDP frees what it has gathered
    (_pipe("fsdp 2 pp 2, always resharded", 4, fsdp_reshard_after_forward="always"), GQA),
    # biases: a sharded product's is added once
    (Layout("tp 2", 2, {TP: 2}), BIASED),
    # a description from outside: layers that differ, norms of 1 + weight before and after
    (_pipe("tp 2 pp 2", 4, **{TP: 2}), GEMMA),
]
# More ranks, or one more of a kind that CASES has; compiled layers: test_compile.py
SLOW_CASES = [
    (_pipe("pp 2"), QWEN_TIED),
    (_pipe("cp 2 pp 2", 4, **{CP: 2}), GQA),
    (_pipe("InterleavedZeroBubble tp 2", 4, **{SCHEDULE: "InterleavedZeroBubble", TP: 2, MICROBATCH: 4}), TIED),
    (Layout("fsdp 2 tp 2 cp 2", 8, {TP: 2, CP: 2}), GEMMA),
    (Layout("operations kept, tp 2", 2, {TP: 2}, sections={"activation_checkpoint": OP}), QWEN_GQA),
    (Layout("tp 2 cp 2", 4, {TP: 2, CP: 2}), TIED),
    (Layout("compiled, fsdp 2", 2, sections={"compile": AOT_EAGER}), TIED),
    (Layout("fsdp 2 tp 2", 4, {TP: 2}), BIASED),
    (FSDP_TP_PP, TIED),  # the preset debug trains in it
    (Layout("accumulation 4", 2, training={"local_batch_size": 1}), TIED),
    (_pipe("replicas 2 pp 2", 4, **{REPLICAS: 2}), TIED),
    (Layout("pp 4", 4, {PP: 4, MICROBATCH: 2} | EVEN), TIED),
    (Layout("replicas 2 tp 2", 4, {REPLICAS: 2, TP: 2}), TIED),
    (Layout("replicas 2 cp 2", 4, {REPLICAS: 2, CP: 2}), GQA),
    (Layout("fsdp 2 cp 2", 4, {CP: 2}), TIED),
    (_pipe("LoopedBFS, a layer per stage", **{SCHEDULE: "LoopedBFS", LAYERS_PER_STAGE: 1} | EVEN), GQA),
    (_pipe("explicit stages", module_fqns_per_model_part=EXPLICIT), GQA),
    (Layout("operations kept, tp 2", 2, {TP: 2}, sections={"activation_checkpoint": OP}), GQA),
    (_pipe("every 2nd layer, pp 2", sections={"activation_checkpoint": EVERY_2ND}), TIED),
    (Layout("fsdp 2, offloaded", 2, training={"enable_cpu_offload": True}), TIED),
    (Layout("compiled, memory budget", 2, sections=BUDGET), TIED),
    *zip(MAIN, (TIED, GQA, TIED, GQA), strict=True),
    (Layout("fsdp 4", 4), TIED),
    (Layout("fsdp 2 tp 2 cp 2", 8, {TP: 2, CP: 2}), GQA),
    (Layout("hsdp 2x2 tp 2", 8, {REPLICAS: 2, TP: 2}), GQA),
    (_pipe("ZBVZeroBubble cp 2", 4, **{SCHEDULE: "ZBVZeroBubble", CP: 2, MICROBATCH: 4}), GQA),
    (Layout("plain loss, tp 2", 2, {TP: 2}, training={"loss": "plain"}), TIED),
    (_pipe("compiled, pp 2", sections={"compile": AOT_EAGER}), GQA),
    (Layout("cp 2", 2, {CP: 2}), QWEN_GQA),
    (Layout("tp 4", 4, {TP: 4}), GQA),
    (Layout("replicas 4", 4, {REPLICAS: 4}), GQA),
    (Layout("cp 4", 4, {CP: 4}), GQA),
    (_pipe("fsdp 2 pp 2", 4), GQA),
    (_pipe("tp 2 pp 2", 4, **{TP: 2}), TIED),
    (FSDP_TP_PP, GQA),
    (_pipe("ZBVZeroBubble fsdp 2 tp 2", 8, **{SCHEDULE: "ZBVZeroBubble", TP: 2}), TIED),
    (Layout("fsdp 2 tp 2", 4, {TP: 2}, sections={"activation_checkpoint": OP}), QWEN_GQA),
    (_pipe("InterleavedZeroBubble fsdp 2", 4, **{SCHEDULE: "InterleavedZeroBubble"}), GQA),
    (Layout("operations kept, cp 2", 2, {CP: 2}, sections={"activation_checkpoint": OP}), TIED),
    (Layout("accumulation 4, replicas 2", 2, {REPLICAS: 2}, training={"local_batch_size": 1}), GQA),
    (Layout("plain loss, whole logits, tp 2", 2, {TP: 2, "disable_loss_parallel": True}, {"loss": "plain"}), GQA),
    (Layout("fsdp 2, always resharded", 2, {"fsdp_reshard_after_forward": "always"}), TIED),
    (Layout("compiled, tp 2", 2, {TP: 2}, sections={"compile": AOT_EAGER}), GQA),
    (Layout("compiled, cp 2", 2, {CP: 2}, sections={"compile": AOT_EAGER}), TIED),
    (Layout("compiled, operations kept", 2, sections={"compile": AOT_EAGER, "activation_checkpoint": OP}), GQA),
    (Layout("fsdp 2", 2), QWEN_GQA),
    (_pipe("a first stage of one layer", **{FIRST_LESS: 2, LAST_LESS: 0}), TIED),
    (Layout("whole logits in chunks, tp 2", 2, {TP: 2, "disable_loss_parallel": True}), TIED),
    (_pipe("plain loss, pp 2", 2, sections={"training": {"loss": "plain"}}), TIED),
    (Layout("fsdp 2, never resharded", 2, {"fsdp_reshard_after_forward": "never"}), GQA),
    (_pipe("ZBVZeroBubble fsdp 2", 4, **{SCHEDULE: "ZBVZeroBubble"}), QWEN_GQA),
    (_pipe("ZBVZeroBubble tp 2", 4, **{SCHEDULE: "ZBVZeroBubble", TP: 2}), BIASED),
    (Layout("compiled, tp 2", 2, {TP: 2}, sections={"compile": AOT_EAGER}), BIASED),
    (Layout("tp 2 cp 2", 4, {TP: 2, CP: 2}, sections={"activation_checkpoint": OP}), BIASED),
    (_pipe("fsdp 2 tp 2 pp 2", 8, **{TP: 2}), QWEN_BIASED),
    (Layout("fsdp 2 tp 2 pp 2 cp 2", 16, {TP: 2, PP: 2, CP: 2, MICROBATCH: 2}), GQA),
    (Layout("fsdp 2 tp 2 pp 2 cp 2, V", 16, {TP: 2, PP: 2, CP: 2, MICROBATCH: 2, SCHEDULE: "ZBVZeroBubble"}), TIED),
]
