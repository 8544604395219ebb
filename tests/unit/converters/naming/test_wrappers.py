"""Names that wrappers changed, from the wrappers' own state dicts: removed, reported, and never two for one."""

import re

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from converters.common.errors import CheckpointError, UnsupportedError
from converters.diff import diff
from converters.inspect import inspect_checkpoint
from converters.source.open import open_checkpoint
from converters.store.manifest import read_manifest
from tests.doors import convert, reshard
from tests.unit.converters.samples import save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('gloo') / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("source")
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "hf")
    convert(folder / "hf", folder / "dcp", to="dcp")
    return folder


def load(source) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(source / "hf")


def ddp(model):
    return DistributedDataParallel(model)


def compiled(model):
    return torch.compile(model)


def compiled_blocks(model):
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(layer)
    return model


def recomputed(model):
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    return model


def recomputed_and_compiled(model):
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(checkpoint_wrapper(layer))
    return model


class Recomputed:
    """Without the hook that removes the name."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        state = self.model.state_dict()
        return {re.sub(r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", n): t for n, t in state.items()}


class Lit(nn.Module):
    """As a LightningModule holds its model."""

    def __init__(self, model):
        super().__init__()
        self.model = model


class Net(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.net = model


WRAPPED = {
    "ddp": (ddp, {"module."}),
    "compile": (compiled, {"_orig_mod."}),
    "compile, each block": (compiled_blocks, {"_orig_mod."}),
    "recomputed": (recomputed, set()),  # its own hook removes the name
    "recomputed, older torch": (Recomputed, {"_checkpoint_wrapped_module."}),
    "ddp of compile": (lambda m: ddp(compiled(m)), {"module.", "_orig_mod."}),
    "compile of ddp": (lambda m: compiled(ddp(m)), {"module.", "_orig_mod."}),
    "all": (
        lambda m: ddp(compiled(recomputed_and_compiled(m))),
        {"module.", "_orig_mod."},
    ),
    "lightning": (Lit, {"model."}),
    "lightning, another attribute": (Net, {"net."}),
    "lightning of compile": (lambda m: Lit(compiled(m)), {"model.", "_orig_mod."}),
}


def put(folder, state, container: str):
    """`state` as one of the files that trainers write; next to it what says the model."""
    CONFIG.architectures = ["LlamaForCausalLM"]
    folder.mkdir(exist_ok=True)
    match container:
        case "torch file":
            torch.save(state, folder / "ckpt.pt")
        case "torch file, nested":
            torch.save({"model": state, "step": 3}, folder / "ckpt.pt")
        case "lightning":
            optimizer = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
            rest = {"epoch": 1, "global_step": 3, "optimizer_states": [optimizer], "lr_schedulers": []}
            torch.save({"state_dict": state, **rest}, folder / "last.ckpt")
        case "hf bin":
            torch.save(state, folder / "pytorch_model.bin")
        case "safetensors":
            safetensors.torch.save_file({n: t.clone() for n, t in state.items()}, folder / "model.safetensors")
        case "dcp":
            save_dcp(folder, state)
        case "dcp, nested":
            save_dcp(folder, {"app": {"model": state}})
    CONFIG.save_pretrained(folder)
    return folder


OFTEN = ("lightning", "dcp")
CONTAINERS = ["torch file", "torch file, nested", "lightning", "hf bin", "safetensors", "dcp", "dcp, nested"]


# Every container with one wrapper, and every wrapper in two containers
@pytest.mark.parametrize(
    ("wrapper", "container"),
    [
        pytest.param(wrapper, container, marks=[pytest.mark.slow] * (wrapper != "all" and container not in OFTEN))
        for wrapper in WRAPPED
        for container in CONTAINERS
    ],
)
def test_wrappers_names_are_read_and_reported(gloo, source, tmp_path, wrapper, container):
    wrap, expected = WRAPPED[wrapper]
    state = wrap(load(source)).state_dict()
    folder = put(tmp_path / "src", state, container)
    report = convert(folder, tmp_path / "out", to="dcp")
    assert read_manifest(tmp_path / "out").tensors == read_manifest(source / "dcp").tensors
    output = [note for note in report.remarks if note.startswith("names: removed the prefix")]
    assert {note.split("`")[1] for note in output} == expected
    assert inspect_checkpoint(folder).naming == "hf" and set(output) <= set(inspect_checkpoint(folder).notes)


def test_a_whole_model_in_front_is_counted(gloo, source, tmp_path):
    folder = put(tmp_path / "src", ddp(load(source)).state_dict(), "torch file")
    number = len(load(source).state_dict())
    assert f"names: removed the prefix `module.` ({number} tensors)" in open_checkpoint(folder).notes
    assert diff(folder, source / "hf").equal


@pytest.mark.parametrize("container", ["torch file", "dcp"])
def test_native_names_too(source, tmp_path, container):
    convert(source / "hf", tmp_path / "model.pt", to="torch")
    state = torch.load(tmp_path / "model.pt")
    wrapped = {f"module._orig_mod.{name}".replace(".attention.", "._fsdp_wrapped_module.attention."): t
               for name, t in state.items()}  # fmt: skip
    folder = tmp_path / "src"
    folder.mkdir()
    save_dcp(folder, wrapped) if container == "dcp" else torch.save(wrapped, folder / "ckpt.pt")
    convert(folder, tmp_path / "out", to="dcp", model_from=source / "dcp")
    assert read_manifest(tmp_path / "out").tensors == read_manifest(source / "dcp").tensors


@pytest.mark.parametrize("prefix", ["base_model.model.", "net.module."])
def test_two_attributes_in_front_of_the_model(source, tmp_path, prefix):
    """Of PEFT's merged models, and of a module that holds a wrapped one: no name is a model's after the first alone."""
    torch.save({f"{prefix}{name}": tensor for name, tensor in load(source).state_dict().items()}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "out", to="dcp", model_from=source / "dcp")
    assert read_manifest(tmp_path / "out").tensors == read_manifest(source / "dcp").tensors
    assert open_checkpoint(tmp_path / "x.pt").prefixes.keys() == {prefix}


def test_names_without_wrappers_stay(source, tmp_path):
    """HF's own `model.`, and torchtitan's older one."""
    assert open_checkpoint(source / "hf").prefixes == {}
    convert(source / "hf", tmp_path / "model.pt", to="torch")
    state = {f"model.{name}": tensor for name, tensor in torch.load(tmp_path / "model.pt").items()}
    save_dcp(tmp_path / "titan", state)
    assert open_checkpoint(tmp_path / "titan").prefixes == {}


@pytest.mark.parametrize("extra", ["model.norm.weight", "_orig_mod.model.norm.weight"])
def test_two_names_that_become_one_are_an_error(source, tmp_path, extra):
    state = {f"module.{name}": tensor for name, tensor in load(source).state_dict().items()}
    state[extra] = torch.zeros(16)
    state["module._orig_mod.model.norm.weight"] = torch.zeros(16)
    put(tmp_path / "src", state, "torch file")
    with pytest.raises(CheckpointError, match=r"ckpt.pt: two entries have one name once `.*` is removed:\n  .* and "):
        open_checkpoint(tmp_path / "src")


def test_an_optimizer_s_names_follow(gloo, source, tmp_path):
    """Named states and a group's list of parameters, as FSDP.optim_state_dict leaves them around a compiled model."""
    model = ddp(compiled(load(source)))
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=0.1)
    for number, parameter in enumerate(named.values()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    states = {name: optimizer.state[parameter] for name, parameter in named.items()}
    groups = [{"lr": 0.1, "params": list(named)}]

    def save(folder, rename):
        state = {rename(n): t for n, t in model.state_dict().items()}
        theirs = {"state": {rename(n): s for n, s in states.items()},
                  "param_groups": [{"lr": 0.1, "params": [rename(n) for n in groups[0]["params"]]}]}  # fmt: skip
        save_dcp(folder, {"model": state, "optimizer": theirs})
        CONFIG.save_pretrained(folder)
        return folder

    CONFIG.architectures = ["LlamaForCausalLM"]
    plain = save(tmp_path / "plain", lambda name: name.removeprefix("module._orig_mod."))
    wrapped = save(tmp_path / "wrapped", lambda name: name)
    reshard(plain, tmp_path / "expected")
    report = reshard(wrapped, tmp_path / "out")
    assert read_manifest(tmp_path / "out").tensors == read_manifest(tmp_path / "expected").tensors
    assert diff(tmp_path / "out", tmp_path / "expected").equal
    assert any("`_orig_mod.`" in remark for remark in report.remarks)


# ---- errors name the file that was given


def test_errors_name_the_file(source, tmp_path):
    path = tmp_path / "other.pt"
    torch.save({f"encoder.{number}.weight": torch.zeros(3) for number in range(5)}, path)
    with pytest.raises(CheckpointError, match=f"{path}: no tensor has a name"):
        convert(path, tmp_path / "out", to="dcp", model_from=source / "hf")
    torch.save({f"module.{n}": t for n, t in list(load(source).state_dict().items())[3:]}, path)
    with pytest.raises(CheckpointError, match=f"{path}: the tensors do not match"):
        convert(path, tmp_path / "out", to="dcp", model_from=source / "hf")
    safetensors.torch.save_file({"odd\x1b[31m": torch.zeros(3)}, tmp_path / "odd.safetensors")
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'odd.safetensors'}: names that are empty"):
        open_checkpoint(tmp_path / "odd.safetensors")


def test_fsdp_s_flattened_parameters_are_refused_by_name(source, tmp_path):
    torch.save({"_fsdp_wrapped_module._flat_param": torch.zeros(100)}, tmp_path / "local.pt")
    with pytest.raises(UnsupportedError, match="local.pt: FSDP's flattened parameters"):
        open_checkpoint(tmp_path / "local.pt")
