"""Attention within documents: a packed batch has the loss and gradients of its documents one by one, in any layout."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.layouts import (
    AOT_EAGER,
    CP,
    EP,
    FULL,
    GQA,
    MICROBATCH,
    ONE_RANK,
    OP,
    PP,
    QWEN_GQA,
    REPLICAS,
    SCHEDULE,
    TP,
)
from tests.dist.runs import begin_from, make_config, run
from tests.dist.training import (
    BIASED_EXPERTS,
    GLOBAL_BATCH,
    LATENTS,
    SCALED_EXPERTS,
    SEQ_LEN,
    Layout,
    build_model,
    make_step,
    whole_loss,
)
from tests.dist.training import EXPERTS as EXPERTS_FAMILY
from trainer.config.sections import Config
from trainer.data.batch import TokenBatch, batch_of
from trainer.data.prepare import prepare
from trainer.data.sample import DocumentRules, window_sample

VOCABULARY, END = 2048, 7
EXPERTS, V3, V2_LITE = f"{EXPERTS_FAMILY}/debug_moe_mixed", f"{LATENTS}/debug_v3", f"{LATENTS}/debug_v2_lite"
WINDOW, SCOUT = f"{BIASED_EXPERTS}/debug_window", f"{SCALED_EXPERTS}/debug_scout"
# Documents of each sample: of one token, of the whole sample, cut at and between the chunks of context parallelism
LENGTHS = ((65,), (1, 64), (30, 1, 4, 30), (16, 16, 16, 17), (5, 33, 27), (63, 2), (20, 20, 25), (9, 8, 7, 6, 35))
assert len(LENGTHS) == GLOBAL_BATCH and all(sum(lengths) == SEQ_LEN + 1 for lengths in LENGTHS)


def token_ids() -> np.ndarray:
    """[samples, S + 1]; the last token of a document is END, as are some others."""
    ids = np.random.default_rng(3).integers(8, VOCABULARY, (GLOBAL_BATCH, SEQ_LEN + 1))
    for row, lengths in zip(ids, LENGTHS, strict=True):
        row[np.cumsum(lengths) - 1] = END
    ids[3, 20] = ids[6, 3] = END
    return ids


def packed(mask: str) -> TokenBatch:
    rules = DocumentRules(mask, end_id=END)
    pairs = zip(token_ids(), LENGTHS, strict=True)
    samples = [window_sample(row, np.cumsum((0, *lengths[:-1])), rules) for row, lengths in pairs]
    return batch_of(samples, pin_memory=False)


def own_packed(model, mask: str) -> TokenBatch:
    batch, mesh = packed(mask), model.meshes["batch"]
    parts = (t.chunk(mesh.size())[mesh.get_local_rank()] for t in (batch.tokens, batch.targets, batch.documents))
    return TokenBatch(*parts)


def gradients_of(model) -> dict[str, torch.Tensor]:
    found = {}
    for fqn, parameter in model.named_parameters().items():
        gradient, parameter.grad = parameter.grad, None
        found[fqn] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def one_by_one(flavor: str, path: Path) -> None:
    """Case, one rank: the loss and gradients of the documents, each run by itself by a model without masks."""
    model, ids = build_model(ONE_RANK, flavor), token_ids()
    num_valid = sum(length - 1 for lengths in LENGTHS for length in lengths)
    loss = 0.0
    for row, lengths in zip(ids, LENGTHS, strict=True):
        for document in np.split(row, np.cumsum(lengths)[:-1]):
            if len(document) > 1:
                tokens, targets = (torch.from_numpy(part)[None] for part in (document[:-1], document[1:]))
                loss += model.forward_backward(TokenBatch(tokens, targets), num_valid).item()
    torch.save({"loss": loss, "num_valid": num_valid, "gradients": gradients_of(model)}, path)


class DenseAttention(nn.Module):
    """Attention under torchtitan v0.2.2's mask, models/attention.py: a document ends with each END of the input."""

    def __init__(self, tokens_BL: torch.Tensor):
        super().__init__()
        ends = (tokens_BL == END).long().cumsum(1)
        numbers_BL = F.pad(ends[:, :-1], (1, 0))
        self.sees_B1LL = (numbers_BL[:, :, None] == numbers_BL[:, None]).tril()[:, None]

    def forward(self, q, k, v, scale=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.sees_B1LL, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)


def by_dense_masks(flavor: str, path: Path) -> None:
    """Case, one rank: the loss and gradients under v0.2.2's meaning, every token of the input being valid."""
    model, ids = build_model(ONE_RANK, flavor), torch.from_numpy(token_ids())
    batch = TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    for layer in model.parts[0].layers.values():
        layer.attention.inner_attention = DenseAttention(batch.tokens)
    num_valid = batch.targets.numel()
    loss = model.forward_backward(batch, num_valid).item()
    torch.save({"loss": loss, "num_valid": num_valid, "gradients": gradients_of(model)}, path)


REFERENCES = {"offsets": one_by_one, "eos": by_dense_masks}


def compared(layout: Layout, flavor: str, mask: str, path: Path) -> dict:
    """Case: a step of the packed batch, twice, and its validation, beside the reference."""
    expected = torch.load(path)
    torch._dynamo.reset()
    model, config = build_model(layout, flavor), layout.config(flavor)
    step = make_step(model, config, max_norm=float("inf"))
    given = []
    hook = model.parts[0].register_forward_pre_hook(lambda _, *inputs: given.append(inputs), with_kwargs=True)
    result = step.compute_gradients(own_packed(model, mask)).read()
    hook.remove()
    found = gradients_of(model)
    step.compute_gradients(own_packed(model, mask))
    again = gradients_of(model)
    validated = whole_loss(model, model.forward_loss(own_packed(model, mask))) / expected["num_valid"]
    return {
        "loss": result.loss / expected["loss"] - 1,
        "validated": validated / expected["loss"] - 1,
        "num_valid": result.num_units - expected["num_valid"],
        "gradients": {
            fqn: ((gradient - expected["gradients"][fqn]).norm() / expected["gradients"][fqn].norm()).item()
            for fqn, gradient in found.items()
        },
        "rerun differs": [fqn for fqn, gradient in found.items() if not gradient.equal(again[fqn])],
        "restarts": sum(int((positions_of(*inputs) == 0).sum()) for inputs in given),
    }


def positions_of(args: tuple, kwargs: dict) -> torch.Tensor:
    """Of each sample that a part got, as a pipeline or as the whole model gives them."""
    positions = kwargs.get("positions", args[-2] if len(args) > 1 else None)
    return positions.expand(len(args[0]), -1)


@pytest.fixture(scope="module")
def reference(pools, tmp_path_factory):
    """(flavor, mask) → the file of the reference."""
    folder, made = tmp_path_factory.mktemp("documents"), {}

    def run(flavor: str, mask: str) -> Path:
        if (flavor, mask) not in made:
            made[flavor, mask] = folder / f"{flavor.replace('/', '-')}-{mask}.pt"
            pools[1].run(REFERENCES[mask], flavor, made[flavor, mask])
        return made[flavor, mask]

    return run


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A token index of many documents of different lengths."""
    folder, draw = tmp_path_factory.mktemp("documents"), random.Random(0)
    texts = [" ".join(draw.choices([f"word{n}" for n in range(40)], k=draw.randint(1, 20))) for _ in range(400)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([folder / "texts.jsonl"], folder / "index", vocab_size=290, held_out=0.1)
    return folder / "index"


@pytest.mark.parametrize("packing", ["best_fit", pytest.param("concatenated", marks=pytest.mark.slow)])
def test_a_run_resumes_on_another_number_of_ranks(pools, documents, tmp_path, packing):
    """Of torchtitan's flavor, with validation: the same samples, as the losses show."""

    def config(name: str, *, ranks: int) -> Config:
        training = {"packing": packing, "local_batch_size": 2 // ranks}
        return make_config(
            documents,
            tmp_path / name,
            flavor="debugmodel_varlen_attn",
            parallelism={"data_parallel_shard_degree": ranks},
            training=training,
            validation={"enable": True, "steps": 2, "local_batch_size": 4 // ranks},
            optimizer={"lr": 1e-3},
        )

    assert pools[2].run(run, config("two", ranks=2)) == ["", ""]
    begin_from(tmp_path / "one", tmp_path / "two", 2)
    assert pools[1].run(run, config("one", ranks=1)) == [""]
    two, one = (records(tmp_path / name) for name in ("two", "one"))
    assert [sorted(each) for each in (two, one)] == [[1, 2, 3, 4], [3, 4]]
    for step in (3, 4):
        for key in ("loss", "validation_loss"):
            assert one[step].get(key) == pytest.approx(two[step].get(key), abs=5e-6)
    assert one[4]["validation_loss"] > 0


def records(dump: Path) -> dict[int, dict]:
    """What the metrics of a run have for each step."""
    found: dict[int, dict] = {}
    for record in map(json.loads, (dump / "metrics.jsonl").read_text().splitlines()):
        if "resumed_from" not in record:
            found.setdefault(record["step"], {}).update(record)
    return found


INTERLEAVED = {PP: 2, MICROBATCH: 2, SCHEDULE: "Interleaved1F1B"}
CASES = [
    (Layout("one rank"), GQA, "offsets"),
    (Layout("one rank"), GQA, "eos"),
    (Layout("fsdp 2, operations kept", 2, sections={"activation_checkpoint": OP}), QWEN_GQA, "offsets"),
    (Layout("tp 2", 2, {TP: 2}), GQA, "offsets"),
    (Layout("cp 2, full recomputation", 2, {CP: 2}, sections={"activation_checkpoint": FULL}), GQA, "offsets"),
    (Layout("1F1B", 2, {PP: 2, MICROBATCH: 2}), GQA, "eos"),
    # windows and chunks count from a document's first token
    (Layout("cp 2", 2, {CP: 2}), WINDOW, "offsets"),
    (Layout("one rank"), SCOUT, "offsets"),
]
SLOW_CASES = [
    (Layout("Interleaved1F1B, cp 2", 4, INTERLEAVED | {CP: 2}), GQA, "offsets"),
    (Layout("compiled, cp 2", 2, {CP: 2}, sections={"compile": AOT_EAGER}), GQA, "offsets"),
    (Layout("accumulated, replicas 2", 2, {REPLICAS: 2}, {"local_batch_size": 1}), GQA, "offsets"),
    (Layout("fsdp 2 tp 2", 4, {TP: 2}), QWEN_GQA, "offsets"),
    (Layout("hsdp 2x2", 4, {REPLICAS: 2}), GQA, "offsets"),
    (Layout("cp 4", 4, {CP: 4}), GQA, "eos"),
    (Layout("tp 2 cp 2", 4, {TP: 2, CP: 2}, sections={"activation_checkpoint": OP}), GQA, "offsets"),
    (Layout("GPipe", 2, {PP: 2, MICROBATCH: 2, SCHEDULE: "GPipe"}), GQA, "offsets"),
    (Layout("Interleaved1F1B, recomputed", 2, INTERLEAVED, sections={"activation_checkpoint": FULL}), GQA, "offsets"),
    (
        Layout(
            "ZBVZeroBubble by varlen",
            2,
            {PP: 2, MICROBATCH: 2, SCHEDULE: "ZBVZeroBubble"},
            sections={"model": {"attn_type": "varlen"}},
        ),
        GQA,
        "offsets",
    ),
    (Layout("compiled, tp 2", 2, {TP: 2}, sections={"compile": AOT_EAGER, "activation_checkpoint": OP}), GQA, "eos"),
    (Layout("compiled, interleaved", 2, INTERLEAVED, sections={"compile": AOT_EAGER}), GQA, "offsets"),
    (Layout("tp 2 ep 2", 2, {TP: 2, EP: 2}), EXPERTS, "offsets"),
    (Layout("ep 2 cp 2, operations kept", 4, {EP: 2, CP: 2}, sections={"activation_checkpoint": OP}), EXPERTS, "eos"),
    (Layout("tp 2 ep 2", 2, {TP: 2, EP: 2}), V3, "offsets"),
    (Layout("tp 2 cp 2, full recomputation", 4, {TP: 2, CP: 2}, sections={"activation_checkpoint": FULL}), V3, "eos"),
    (Layout("cp 2 pp 2", 4, {CP: 2, PP: 2, MICROBATCH: 2}), V2_LITE, "offsets"),
    (Layout("fsdp 2 tp 2 pp 2 cp 2", 16, {TP: 2, PP: 2, CP: 2, MICROBATCH: 2}), GQA, "offsets"),
    (Layout("one rank, operations kept", sections={"activation_checkpoint": OP}), WINDOW, "offsets"),
    (Layout("compiled, cp 2", 2, {CP: 2}, sections={"compile": AOT_EAGER}), SCOUT, "offsets"),
    (Layout("tp 2 pp 2", 4, {TP: 2, PP: 2, MICROBATCH: 2}), WINDOW, "offsets"),
    (Layout("cp 4", 4, {CP: 4}), SCOUT, "offsets"),
]


@pytest.mark.parametrize(
    ("layout", "flavor", "mask"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_packed_batch_equals_its_documents(pools, reference, layout, flavor, mask):
    path = reference(flavor, mask)
    masked = Layout(
        layout.name, layout.world_size, layout.parallelism, layout.training | {"document_mask": mask}, layout.sections
    )
    outputs = pools[layout.world_size].run(compared, masked, flavor, mask, path)
    for output in outputs:
        assert output["num_valid"] == 0
        assert output["loss"] == pytest.approx(0, abs=1e-6)
        assert output["validated"] == pytest.approx(0, abs=1e-6)
        assert {fqn: error for fqn, error in output["gradients"].items() if not error <= 1e-5} == {}
        assert output["rerun differs"] == []
    num_copies = layout.parallelism.get(TP, 1) * layout.parallelism.get(PP, 1)
    num_restarts = {"offsets": sum(map(len, LENGTHS)), "eos": GLOBAL_BATCH}[mask]
    assert sum(output["restarts"] for output in outputs) == num_restarts * num_copies
