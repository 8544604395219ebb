"""Training checkpoints that stock torch wrote: `titan reshard` translates them, and training continues as in torch.

transformers and torch's own AdamW make the source; what must come out is computed with the formula that Meta's
converter is known by, and the next step is compared with torch's own.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from converters.common.errors import UnsupportedError
from converters.families.llama3 import FLAVORS
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import ModelInfo, write_model_info
from converters.source.open import open_checkpoint
from converters.store.location import locate
from tests.dist import runs
from tests.doors import reshard
from tests.models.names import interleaved, native_name

# Far from zero, so that the rounding of two different forward passes is not blown up where gradients are small
EPS, LR = 1e-3, 1e-2


@dataclass(frozen=True)
class Source:
    """The form of a checkpoint: names, style of the optimizer, and keys of both."""

    naming: str  # hf, titan
    flat: bool  # torch's flatten_optimizer_state_dict
    keys: tuple[str, str] = ("model", "optimizer")
    flavor: str = "debug_gqa"

    def __str__(self) -> str:
        return f"{self.naming}-{'flat' if self.flat else 'groups'}-{'.'.join(self.keys)}-{self.flavor}"


SOURCES = [
    Source("hf", flat=True),
    Source("hf", flat=False, flavor="debug_tied"),
    Source("hf", flat=False, keys=("", "optim")),
    Source("titan", flat=True),
    Source("titan", flat=False, keys=("app.model", "app.optim")),
]


def hf_model(flavor: str) -> LlamaForCausalLM:
    args = FLAVORS[flavor]
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.dim,
            intermediate_size=args.ffn_hidden,
            num_hidden_layers=args.num_layers,
            num_attention_heads=args.num_heads,
            num_key_value_heads=args.num_kv_heads,
            vocab_size=args.vocab_size,
            rms_norm_eps=args.norm_eps,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": args.rope_theta,
                "factor": args.rope_scaling.factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            max_position_embeddings=args.max_seq_len,
            tie_word_embeddings=args.tied,
        )
    )


def native(name: str, tensor: torch.Tensor, flavor: str) -> tuple[str, torch.Tensor]:
    """A Hugging Face name and tensor as Meta, and we, have it."""
    args, name = FLAVORS[flavor], native_name(name)
    if name.endswith((".wq.weight", ".wk.weight")):
        heads = args.num_heads if ".wq." in name else args.num_kv_heads
        tensor = interleaved(tensor, heads)
    return name, tensor


def renamed(module: torch.nn.Module, flavor: str) -> torch.nn.Module:
    """The same parameters in a tree of modules that has native names: nothing but a state dict is wanted of it."""
    root = torch.nn.Module()
    for name, parameter in module.named_parameters():
        name, values = native(name, parameter.detach(), flavor)
        *path, leaf = name.split(".")
        at = root
        for key in path:
            if not hasattr(at, key):
                at.add_module(key, torch.nn.Module())
            at = getattr(at, key)
        at.register_parameter(leaf, torch.nn.Parameter(values.clone()))
        at.get_parameter(leaf).grad = native(name, torch.zeros_like(parameter), flavor)[1]
    return root


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens, targets, num_valid: int) -> None:
    optimizer.zero_grad()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_valid
    loss.backward()
    optimizer.step()


def adamw(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)


def write_source(source: Source, folder: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW) -> None:
    """Save as torch's users do: get_state_dict, and dcp.save of a nested dict."""
    options = StateDictOptions(flatten_optimizer_state_dict=source.flat)
    module = model
    if source.naming == "titan":
        module = renamed(model, source.flavor)
        theirs = dict(model.named_parameters())
        ours = {native(name, p, source.flavor)[0]: (name, p) for name, p in theirs.items()}
        named = dict(module.named_parameters())
        optimizer_of_names = adamw(named.values())
        for fqn, parameter in named.items():
            state = optimizer.state[ours[fqn][1]]
            moments = {k: native(ours[fqn][0], state[k], source.flavor)[1].clone() for k in ("exp_avg", "exp_avg_sq")}
            optimizer_of_names.state[parameter] = {"step": state["step"].clone(), **moments}
        optimizer = optimizer_of_names
    weights, states = get_state_dict(module, optimizer, options=options)
    state: dict = {
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": torch.tensor(3, dtype=torch.int32), "ntokens_seen": torch.tensor(99)},
        "dataloader": {"dp_rank_0": b"somebody's pickle", "world_size": 1},
    }
    for keys, values in zip(source.keys, (weights, states), strict=True):
        at = state
        for key in filter(None, keys.split(".")):
            at = at.setdefault(key, {})
        at |= values
    dcp.save(state, checkpoint_id=str(folder))
    write_model_info(folder, ModelInfo("llama3", FLAVORS[source.flavor]))


def go_on(source: Source, config, folder: Path) -> dict[str, float]:
    """Case, one rank: train with torch, save, reshard, resume with the trainer, and take the next step in both."""
    state, checkpoints = runs._run_state(config, runs._ranks())
    batch = next(iter(state.loader))
    model = hf_model(source.flavor)
    optimizer = adamw(model.parameters())
    for _ in range(3):
        step_of(model, optimizer, batch.tokens, batch.targets, batch.num_units)
    write_source(source, folder / "stock", model, optimizer)
    reshard(folder / "stock", folder / "ours", mesh=MeshShape(tp=2), drop=["dataloader"])
    checkpoints.load(locate(folder / "ours"), state)
    assert (state.progress.step, state.progress.units_seen, state.schedule.last_epoch) == (3, 99, 3)
    optimizer.param_groups[0]["lr"] = state.schedule.lr

    ours, theirs = state.model.named_parameters(), dict(model.named_parameters())
    for name, parameter in theirs.items():
        for kind, value in optimizer.state[parameter].items():
            fqn, expected = native(name, value, source.flavor) if value.ndim else (native_name(name), value)
            assert torch.equal(state.optimizer.state[ours[fqn]][kind], expected), (fqn, kind)

    def differences() -> float:
        ours = {name: tensor.detach() for name, tensor in state.model.named_parameters().items()}
        theirs = dict(native(name, p.detach(), source.flavor) for name, p in model.named_parameters())
        assert ours.keys() == theirs.keys()
        return max((ours[name] - theirs[name]).abs().max().item() for name in ours)

    loaded = differences()
    state.model.forward_backward(batch, batch.num_units)
    state.optimizer.step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step_of(model, optimizer, batch.tokens, batch.targets, batch.num_units)
    moved = max((p - before[name]).abs().max().item() for name, p in model.named_parameters())
    return {"loaded": loaded, "moved": moved, "apart": differences()}


@pytest.mark.parametrize(
    "source", [pytest.param(s, marks=[pytest.mark.slow] * (s not in SOURCES[::4])) for s in SOURCES], ids=str
)
def test_the_trainer_continues_as_torch_does(source, data, pools, tmp_path):
    config = runs.make_config(
        data,
        tmp_path,
        flavor=source.flavor,
        optimizer={"lr": LR, "eps": EPS, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1},
        checkpoint={"exclude_from_loading": ("dataloader",)},
    )
    found = pools[1].run(go_on, source, config, tmp_path)[0]
    assert found["loaded"] == 0
    assert found["moved"] > 1e-3
    assert found["apart"] < 1e-6, found


def save_torchtitan(folder: Path) -> None:
    """Case, one rank: what a run with two data-parallel ranks leaves."""
    model = hf_model("debug_gqa")
    optimizer = adamw(model.parameters())
    step_of(model, optimizer, torch.arange(16).view(2, 8), torch.arange(1, 17).view(2, 8), 16)
    source = Source("titan", flat=True, keys=("", "optimizer"))
    write_source(source, folder, model, optimizer)


@pytest.fixture(scope="module")
def torchtitan(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchtitan") / "step-3"
    pools[1].run(save_torchtitan, folder)
    return folder


def test_native_names_are_copied_as_they_are(torchtitan, tmp_path):
    """torchtitan's flat layout is ours: nothing is translated, not even counters that are tensors."""
    report = reshard(torchtitan, tmp_path / "out", num_files=3)
    before, after = open_checkpoint(torchtitan), open_checkpoint(tmp_path / "out")
    assert before.tensors.keys() == after.tensors.keys() and before.values.keys() == after.values.keys()
    assert before.planner_data == after.planner_data
    assert report.loader_state.startswith("dataloader: torchtitan's, a state for each of 1 data-parallel ranks; kept")
    assert not any(remark.startswith("names:") for remark in report.remarks)


def test_a_loader_state_per_rank_does_not_go_to_another_degree(torchtitan, tmp_path):
    with pytest.raises(UnsupportedError, match="1 data-parallel ranks, one each, and dp_shard=2 has 2") as error:
        reshard(torchtitan, tmp_path / "out", mesh=MeshShape(dp_shard=2))
    assert list(error.value.tries) == ["--drop dataloader"]
    reshard(torchtitan, tmp_path / "same", mesh=MeshShape(tp=2))
    report = reshard(torchtitan, tmp_path / "out", mesh=MeshShape(dp_shard=2), drop=["dataloader"])
    assert report.loader_state == "" and report.dropped_sections == {"dataloader": 2}
