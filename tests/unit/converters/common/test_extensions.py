"""What a user's module registers wrongly is refused with its file and line, before it is used."""

import inspect
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from converters.api import (
    Location,
    convert,
    register_container,
    register_family,
    register_format,
    register_outputs,
    register_store,
)
from converters.common import extensions
from converters.common.errors import TitanError, UnsupportedError
from converters.common.extensions import ExtensionError, check_call
from converters.containers.safetensors import SAFETENSORS
from converters.families import registry as families
from converters.families.llama3 import LLAMA3
from converters.formats.torch import TORCH
from converters.store import base, outputs
from tests.models.llama import write as write_llama
from tests.pretend_store import ROOT, PretendOutput, PretendOutputs
from trainer.api import register_model, register_section
from trainer.config.sections import Compile
from trainer.data import datasets
from trainer.data.datasets import open_dataset, register_dataset
from trainer.data.samples import SourceSamples
from trainer.loss import registry as losses
from trainer.loss.install import choose_loss
from trainer.loss.registry import register_loss
from trainer.models import registry as models
from trainer.models.decoder import Transformer
from trainer.models.registry import TrainerFamily, check_parameters
from trainer.next_token.objective import NEXT_TOKEN
from trainer.observability import sinks
from trainer.observability.sinks import LoggedRun, open_registered_sinks, register_metric_sink

TINY = LLAMA3.flavors["debug_gqa"]


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    for module, name in ((families, "_FAMILIES"), (models, "_FAMILIES"), (losses, "_REGISTERED")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    monkeypatch.setattr(datasets, "_OPENERS", dict(datasets._OPENERS))
    monkeypatch.setattr(sinks, "_REGISTERED", {})


def refused_at(thing, call, *args, said: str, **more) -> None:
    """The call is refused, with the line where `thing` is defined."""
    with pytest.raises(ExtensionError, match=re.escape(said)) as raised:
        call(*args, **more)
    assert raised.value.exit_code == 2 and isinstance(raised.value, TitanError)
    assert raised.value.message.startswith(f"{__file__}:{inspect.findsource(thing)[1] + 1}: ")


class Counting:
    fingerprint, vocab_size, unigram_entropy = "counting", 256, None

    def __init__(self, path):
        self.path = path

    def tokens(self, split):
        return np.arange(1000) % 256


def takes_nothing():
    return 0


def takes_one(x):
    return None


class Sink:
    def __init__(self, run):
        self.seen, self.is_closed = [], False

    def log(self, step, metrics):
        self.seen.append(step)

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize(
    ("register", "args", "said"),
    [
        (register_dataset, ("mine", takes_nothing), "dataset 'mine' is called with (dataset_path): too many"),
        (register_loss, ("mine", takes_one), "loss 'mine' is called with (logits, targets): too many"),
        (register_metric_sink, ("mine", takes_nothing), "metric sink 'mine' is called with (run): too many"),
        (models.register, ("mine", TrainerFamily(takes_nothing)), "`build_model` of family 'mine' is called with"),
        (
            families.register,
            (replace(LLAMA3, name="mine", block=takes_one),),
            "`block` of family 'mine' is called with (Args, int)",
        ),
        (
            families.register,
            (replace(LLAMA3, name="mine", parameters=takes_one),),
            "`parameters` of family 'mine' returns None, not a list of Parameter",
        ),
    ],
)
def test_a_function_with_another_signature_is_refused_when_it_is_registered(register, args, said):
    wrong = takes_nothing if "takes_nothing" in str(args) else takes_one
    refused_at(wrong, register, *args, said=said)


def test_what_cannot_be_called_and_what_has_no_signature():
    with pytest.raises(ExtensionError, match="loss 'mine' is None, which cannot be called"):
        register_loss("mine", None)
    check_call(dict.fromkeys, ("keys",), "a function that is not written in Python")


FORMAT = replace(TORCH, name="mine")
CONTAINER = replace(SAFETENSORS, name="mine")
GOOD = TrainerFamily(takes_one, objective=NEXT_TOKEN)


class OtherClaim(PretendOutputs):
    def claim(self, location, *, files, fingerprint):
        pass


class WithoutClaim:
    only_appends = True
    check = PretendOutputs.check


@dataclass(frozen=True)
class Section:
    size: int


@pytest.mark.parametrize(
    ("register", "args", "said"),
    [
        (register_family, ("mine",), "is 'mine', which is not a Family"),
        (register_family, (replace(LLAMA3, name="a b"),), "'a b' cannot be the name of a family"),
        (
            register_family,
            (replace(LLAMA3, ends=takes_nothing),),
            "`ends` of family 'llama3' is called with (Args): too",
        ),
        (
            register_family,
            (replace(LLAMA3, hf_architectures="LlamaForCausalLM"),),
            "is 'LlamaForCausalLM', which is not tuple[str, ...]",
        ),
        (register_family, (replace(LLAMA3, flavors={"8B": 8}),), "which is not Mapping[str, ModelArgs]"),
        (
            register_family,
            (replace(LLAMA3, keep_float32=("norm",)),),
            "family 'llama3' is built in; choose another name",
        ),
        (register_model, ("mine", takes_one), "which is not a TrainerFamily"),
        (
            register_model,
            ("mine", replace(GOOD, tensor_plan=takes_nothing)),
            "is called with (Sequence[Parameter]): too many",
        ),
        (register_model, ("mine", replace(GOOD, objective=takes_one)), "which is not Objective | None"),
        (
            register_model,
            ("mine", replace(GOOD, objective=replace(NEXT_TOKEN, zeros=takes_one))),
            "`zeros` of the objective of family 'mine' is called with (Job, int, bool): too many",
        ),
        (
            register_model,
            ("mine", replace(GOOD, objective=replace(NEXT_TOKEN, axes="cp"))),
            "`axes` of the objective of family 'mine' is 'cp', which is not tuple[str, ...]",
        ),
        (register_model, ("llama3", GOOD), "model 'llama3' is built in"),
        (register_section, ("training", Section), "section 'training' is built in"),
        (register_section, ("mine", Section), "section 'mine': every field needs a default"),
        (register_section, ("mine", Section(8)), "which is not a dataclass"),
        (register_dataset, ("c4", takes_one), "dataset 'c4' is built in"),
        (register_container, (TORCH,), "which is not a Container"),
        (register_container, (SAFETENSORS,), "container 'safetensors' is built in"),
        (
            register_container,
            (replace(CONTAINER, find=takes_nothing),),
            "`find` of container 'mine' is called with (Listing): too",
        ),
        (
            register_container,
            (replace(CONTAINER, suffixes=".npy"),),
            "`suffixes` of container 'mine' is '.npy', which is not tuple[str, ...]",
        ),
        (register_format, (SAFETENSORS,), "which is not a Format"),
        (register_format, (replace(FORMAT, name="hf"),), "format 'hf' is built in"),
        (register_format, (replace(FORMAT, name="my-to-one"),), "'my-to-one' cannot be the name of a format"),
        (
            register_format,
            (replace(FORMAT, plan=takes_one),),
            "`plan` of format 'mine' is called with (Contents, OutputOptions): too",
        ),
        (
            register_format,
            (replace(FORMAT, takes=("shard_size",)),),
            "takes has shard_size; there are mesh, shard_bytes",
        ),
        (register_store, ("mine", takes_nothing), "the opener of mine:// is called with (location): too many"),
        (register_store, ("Mine", takes_one), "'Mine' cannot be the name of a store"),
        (register_store, ("taken", takes_one), "store 'taken' is registered by somebody; choose another name"),
        (register_outputs, ("mine", WithoutClaim()), "what makes the outputs of mine:// has no free_bytes and no "),
        (
            register_outputs,
            ("mine", OtherClaim()),
            "`claim` of what makes the outputs of mine:// is called with (location, files=…",
        ),
        (
            register_outputs,
            ("mine", PretendOutputs),
            "`check` of what makes the outputs of mine:// is called with (location, overw",
        ),
    ],
)
def test_what_breaks_a_protocol_is_refused_with_what_is_expected(monkeypatch, register, args, said):
    monkeypatch.setitem(base._OPENERS, "taken", takes_one)
    monkeypatch.setitem(extensions._OWNERS, ("store", "taken"), "somebody")
    with pytest.raises(ExtensionError, match=re.escape(said)):
        register(*args)


@pytest.mark.parametrize(
    ("opened", "said"),
    [
        (None, "the opener of mine:// returned None, not a Store and a str"),
        ((PretendOutputs(), ""), "the store of mine:// has no location and no "),
    ],
)
def test_what_an_opener_returns_is_checked_when_a_location_is_opened(monkeypatch, opened, said):
    monkeypatch.setattr(base, "_OPENERS", {})
    register_store("mine", lambda location: opened)
    with pytest.raises(ExtensionError, match=said):
        base.open_store(Location("mine://bucket"))


def test_an_output_is_checked_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setenv(ROOT, str(tmp_path / "store"))
    write_llama(tmp_path / "hf")
    monkeypatch.delattr(PretendOutput, "add_small_files")
    monkeypatch.setattr(PretendOutput, "create", None)
    with pytest.raises(ExtensionError, match=r"pretend_store.py:\d+: the output of pretend:// has no add_small_files"):
        convert(tmp_path / "hf", "pretend://bucket/out", to="dcp")
    with pytest.raises(ExtensionError, match="what claims mine:// has no journal and no remarks"):
        outputs.checked_claim(SimpleNamespace(output=None), Location("mine://bucket/out"))


def test_outputs_are_those_of_a_run_whole_or_not_at_all(monkeypatch):
    monkeypatch.setattr(outputs, "_OUTPUTS", {})
    names = ("only_appends", "check", "free_bytes", "bytes_left_behind", "claim")
    Converts = type("Converts", (), {name: getattr(PretendOutputs, name) for name in names})
    register_outputs("mine", Converts())
    with pytest.raises(UnsupportedError, match="only `convert`, `reshard` and `seed` can write to mine://"):
        outputs.run_outputs_at(Location("mine://bucket/run"))
    with pytest.raises(ExtensionError, match="has no prepare and no shared"):
        register_outputs("mine", type("Half", (Converts,), {"sweep": PretendOutputs.sweep})())
    register_outputs("mine", PretendOutputs())
    assert outputs.run_outputs_at(Location("mine://bucket/run")).sweep


def test_a_package_may_register_its_own_again_and_give_a_family_of_titan_s_more_flavors():
    for _ in range(2):
        register_family(replace(LLAMA3, name="mine"))
        register_family(replace(LLAMA3, flavors={"tiny": TINY}))
    assert families.get_family("llama3").flavors == {"tiny": TINY}


@pytest.mark.parametrize("name", ["fingerprint", "vocab_size", "unigram_entropy", "tokens"])
def test_a_dataset_that_lacks_something(name):
    kept = {key: value for key, value in vars(Counting).items() if key != name and not key.startswith("__dict")}
    Lacking = type("Lacking", (), kept)
    register_dataset("mine", Lacking)
    with pytest.raises(ExtensionError, match=f"dataset 'mine' has no {name}"):
        open_dataset("mine", "1", vocab_size=256)


def test_a_dataset_of_other_types():
    register_dataset("mine", takes_one)
    refused_at(takes_one, open_dataset, "mine", "1", vocab_size=256, said="dataset 'mine' is None")

    class Named(Counting):
        vocab_size = "256"

    register_dataset("mine", Named)
    with pytest.raises(ExtensionError, match="`vocab_size` of dataset 'mine' is '256', not an int"):
        open_dataset("mine", "1", vocab_size=256)

    class Other(Counting):
        def tokens(self):
            return np.arange(1000)

    register_dataset("mine", Other)
    refused_at(Other.tokens, open_dataset, "mine", "1", vocab_size=256, said="`tokens` of dataset 'mine' is called")


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3], "a list"),
        (np.ones(9), "an array of float64 of shape (9,)"),
        (np.ones((3, 3), int), "an array of int64 of shape (3, 3)"),
    ],
)
def test_tokens_of_another_type(tokens, found):
    class Other(Counting):
        def tokens(self, split):
            return tokens

    refused_at(Other.tokens, SourceSamples, Other("1"), "train", seq_len=2, seed=0, said=f"`tokens` returned {found}")


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda logits, targets: logits.sum().item(), "a float"),
        (lambda logits, targets: logits.sum(-1), "a tensor of float32 of shape [2, 3]"),
        (lambda logits, targets: logits.bfloat16().sum(), "a tensor of bfloat16 of shape []"),
        (lambda logits, targets: logits.detach().sum(), "a number that does not depend on the logits"),
    ],
)
def test_a_loss_that_is_not_one_number(loss, found):
    register_loss("mine", loss)
    logits, targets = torch.ones(2, 3, 4, requires_grad=True), torch.zeros(2, 3, dtype=torch.int64)
    refused_at(loss, choose_loss("mine", Compile(), None), logits, targets, said=f"loss 'mine' returned {found}")
    register_loss("mine", lambda logits, targets: logits.sum())
    assert choose_loss("mine", Compile(), None)(logits, targets) == 24


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("norm", "the model of family 'llama3' has no norm"),
        ("layers.0.attention", "layer 0 of the model of family 'llama3' has no attention"),
        ("layers.1.attention.inner_attention", "the attention of layer 1 of the model of family 'llama3' has no inner"),
    ],
)
def test_a_model_that_lacks_a_module(path, said):
    with torch.device("meta"):
        model = Transformer(TINY)
    owner, _, name = path.rpartition(".")
    delattr(model.get_submodule(owner), name)
    with pytest.raises(ExtensionError, match=re.escape(said)):
        check_parameters(model, LLAMA3.parameters(TINY), family="llama3")


def test_a_model_whose_blocks_have_no_numbers_of_their_own():
    class Other(Transformer):
        def units(self):
            return [unit._replace(number=0) for unit in super().units()]

    with torch.device("meta"):
        model = Other(TINY)
    with pytest.raises(
        ExtensionError, match=re.escape("have the numbers 0, 0, 0, 0, not 0 to 3 in the order of forward")
    ):
        check_parameters(model, LLAMA3.parameters(TINY), family="llama3")


def test_a_model_with_another_forward():
    class Other(Transformer):
        def forward(self, x):
            return x

    with torch.device("meta"):
        model = Other(TINY)
    said = "`forward` of the model of family 'llama3' is called with (x, positions, documents)"
    refused_at(Other.forward, check_parameters, model, LLAMA3.parameters(TINY), family="llama3", said=said)
    models.register("mine", TrainerFamily(takes_one))
    refused_at(takes_one, check_parameters, None, [], family="mine", said="the model of family 'mine' is None")


RUN = LoggedRun(None, {}, 0)


@pytest.mark.parametrize("name", ["log", "close"])
def test_a_sink_that_lacks_something_or_takes_other_arguments(name):
    Lacking = type("Lacking", (), {"__init__": Sink.__init__, "log": Sink.log, "close": Sink.close} | {name: None})
    delattr(Lacking, name)
    register_metric_sink("mine", Lacking)
    with pytest.raises(ExtensionError, match=f"metric sink 'mine' has no {name}"):
        open_registered_sinks(RUN)
    Other = type("Other", (Sink,), {name: takes_nothing})
    register_metric_sink("mine", Other)
    refused_at(takes_nothing, open_registered_sinks, RUN, said=f"`{name}` of metric sink 'mine' is called with")
    register_metric_sink("mine", lambda run: None)
    with pytest.raises(ExtensionError, match="metric sink 'mine' is None"):
        open_registered_sinks(RUN)


@pytest.mark.parametrize("raises", ["open", "log", "close"])
def test_a_sink_that_raises_is_switched_off_and_reported_once(raises, capsys):
    made = []

    class Raising(Sink):
        def __init__(self, run):
            super().__init__(run)
            made.append(self)
            if raises == "open":
                raise ConnectionError("no server")

        def log(self, step, metrics):
            super().log(step, metrics)
            metrics.clear()
            if raises == "log":
                raise ConnectionError("no server")

        def close(self):
            super().close()
            raise ConnectionError("no server")

    register_metric_sink("raising", Raising)
    register_metric_sink("good", lambda run: made.append(Sink(run)) or made[-1])
    opened = open_registered_sinks(RUN)
    metrics = {"loss": 1.0}
    for step in (1, 2, 3):
        for sink in opened:
            sink.log(step, metrics)
    for sink in opened:
        sink.close()
    raising, good = made
    assert good.seen == [1, 2, 3] and good.is_closed and metrics == {"loss": 1.0}
    assert raising.seen == {"open": [], "log": [1], "close": [1, 2, 3]}[raises]
    assert raising.is_closed == (raises != "open")
    said = capsys.readouterr().err
    assert said.count("no server") == 1 and "'raising' is switched off, training continues without it" in said


def test_an_instance_of_titan_s_own_needs_no_source_of_its_own():
    with pytest.raises(ExtensionError, match=r"types\.SimpleNamespace: it has no x"):
        from converters.common.extensions import check_attributes

        check_attributes(SimpleNamespace(), ("x",), "it")
