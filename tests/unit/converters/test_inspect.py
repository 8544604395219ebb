"""Inspect checkpoints that transformers and torch wrote: from headers, with layers folded, without unpickling."""

import json
import pickle
import random
import re
from itertools import product

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from converters.common.errors import CheckpointError, list_offenders
from converters.common.fold import TensorLine, fold_lines, fold_texts, tree_rows
from converters.formats.base import OutputOptions
from converters.inspect import inspect_checkpoint, summarize_values
from converters.layout.mesh_shape import MeshShape
from tests.doors import convert
from tests.models.llama import write as write_llama
from tests.uploaded import STORES, in_store


@pytest.fixture(autouse=True, params=STORES)
def store(request, monkeypatch):
    in_store(request, monkeypatch, reads=["inspect_checkpoint"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    model = write_llama(folder / "hf", num_hidden_layers=12)
    convert(folder / "hf", folder / "dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=2)))
    return folder, model


def test_model_and_totals(folders):
    folder, model = folders
    for name, container, naming in (("hf", "safetensors", "hf"), ("dcp", "dcp", "native")):
        found = inspect_checkpoint(folder / name)
        assert (found.container, found.naming) == (container, naming)
        assert found.num_parameters == sum(p.numel() for p in model.parameters())
        assert found.num_bytes == 4 * found.num_parameters
        assert found.model["num_layers"] == 12 and found.model["family"] == "llama3"
        assert found.has_manifest == (name == "dcp")


def test_layers_fold(folders):
    lines = {line.name: line for line in inspect_checkpoint(folders[0] / "dcp").lines}
    folded = lines["layers.{0..11}.attention.wk.weight"]
    assert (folded.num_tensors, folded.shape, folded.num_chunks, folded.num_bytes) == (
        12,
        (16, 32),
        24,
        12 * 16 * 32 * 4,
    )
    assert len(lines) == 12
    assert len(inspect_checkpoint(folders[0] / "dcp", fold=False).lines) == 9 * 12 + 3


def test_gaps_and_odd_ones_are_distinguished(tmp_path):
    state = {f"layers.{n}.w": torch.zeros(2, 2) for n in (0, 1, 2, 5)} | {"layers.7.w": torch.zeros(3)}
    torch.save(state, tmp_path / "odd.pt")
    lines = inspect_checkpoint(tmp_path / "odd.pt").lines
    assert [(line.name, line.num_tensors) for line in lines] == [("layers.{0..2,5}.w", 4), ("layers.7.w", 1)]


def test_long_lists_of_problems_fold_over_layers():
    scales = [
        f"missing     layers.{n}.experts.{e}.w1_scale  [1]: layers.{n}.experts.{e}.w1 is float8"
        for n, e in product(range(9), range(3))
    ]
    line = "missing     layers.{0..8}.experts.{0..2}.w1_scale  [1]: layers.{0..8}.experts.{0..2}.w1 is float8"
    assert list_offenders(scales) == f"\n  {line}"
    assert list_offenders(scales[:2]) == f"\n  {scales[0]}\n  {scales[1]}"
    assert fold_texts(["a.0.b.0", "a.1.b.1"]) == ["a.0.b.0", "a.1.b.1"]
    assert fold_texts(["a.0 and b.1", "a.1 and b.2"]) == ["a.0 and b.1", "a.1 and b.2"]


def test_numbers_fold_in_every_place_and_stand_for_exactly_what_there_is(tmp_path):
    names = [f"layers.{n}.experts.{e}.w" for n in range(3) for e in range(4) if (n, e) != (2, 3)]
    torch.save({name: torch.zeros(2) for name in names} | {"12": torch.zeros(2)}, tmp_path / "moe.pt")
    lines = inspect_checkpoint(tmp_path / "moe.pt").lines
    assert [(line.name, line.num_tensors) for line in lines] == [
        ("layers.{0..1}.experts.{0..3}.w", 8),
        ("layers.2.experts.{0..2}.w", 3),
        ("12", 1),
    ]


def test_any_set_of_names_unfolds_to_itself():
    """Random names: the lines' numbers, multiplied out, are the names, each once."""
    draw = random.Random(0)
    for _ in range(200):
        places = draw.randrange(4)
        numbers = {tuple(draw.randrange(4) for _ in range(places)) for _ in range(draw.randrange(1, 30))}
        names = ["a" + "".join(f".{n}.b" for n in tuple_) for tuple_ in numbers]
        lines = fold_lines([TensorLine(name, "model", "float32", (1,), 1, 2, 4) for name in names])
        found = [name for line in lines for name in unfold(line.name)]
        assert sorted(found) == sorted(names)
        assert [line.num_tensors for line in lines] == [len(unfold(line.name)) for line in lines]
        assert sum(line.num_chunks for line in lines) == 2 * len(names)


def unfold(name):
    match = re.search(r"\{([^}]*)\}", name)
    if not match:
        return [name]
    numbers = [
        n for part in match[1].split(",") for n in range(int(part.split("..")[0]), int(part.split("..")[-1]) + 1)
    ]
    return [x for n in numbers for x in unfold(name[: match.start()] + str(n) + name[match.end() :])]


def test_the_tree_adds_up():
    names = ("layers.{0..3}.attention.wq.weight", "layers.{0..3}.norm.weight", "norm.weight", "norm.bias", "step")
    lines = [TensorLine(name, "model", "float32", (2,), 1, 2, 8) for name in names]
    assert [(row.depth, row.name, row.num_tensors) for row in tree_rows(lines)] == [
        (0, "layers.{0..3}", 2),
        (1, "attention.wq.weight", 1),
        (1, "norm.weight", 1),
        (0, "norm", 2),
        (1, "weight", 1),
        (1, "bias", 1),
        (0, "step", 1),
    ]


@pytest.mark.parametrize("step", [torch.tensor(7), torch.tensor(7, dtype=torch.int32), 7])
def test_the_step_of_a_training_checkpoint(tmp_path, step):
    state = {"w": torch.zeros(2), "train_state": {"step": step}}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert inspect_checkpoint(tmp_path / "dcp").step == 7


def test_what_is_next_to_the_weights_is_not_counted_with_them(tmp_path):
    """PyTorch's own recipe, {"model": …, "optim": …}, and a torch file of that kind."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    torch.save({"model": model, "optim": optim}, tmp_path / "x.pt")
    for name in ("dcp", "x.pt"):
        found = inspect_checkpoint(tmp_path / name)
        assert found.num_parameters == 15 and found.dtypes == {"float32": 60}
        assert {line.section for line in found.lines} == {"model", "optim"}


def test_names_tell_the_naming_where_nothing_says_the_model(folders, tmp_path):
    state = load_file(folders[0] / "hf" / "model.safetensors")
    moments = {name: {"exp_avg": torch.zeros_like(tensor)} for name, tensor in state.items()}
    torch.save({"model": state, "optimizer": {"state": moments}}, tmp_path / "x.pt")
    found = inspect_checkpoint(tmp_path / "x.pt")
    assert (found.naming, found.model, found.model_problem) == ("hf", None, "")
    assert found.num_parameters == sum(tensor.numel() for tensor in state.values())


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_values_are_shown_and_pickles_never_run(tmp_path, capsys):
    lr = {f"{fqn}.lr": 1e-3 for fqn in ("norm.weight", "output.weight")}
    state = {
        "norm.weight": torch.zeros(3),
        "optimizer": {"param_groups": lr},
        "train_state": {"step": 7},
        "dataloader": {"dp_rank_0": pickle.dumps(Evil()), "odd": Evil()},
    }
    dcp.save(state, checkpoint_id=str(tmp_path / "step-7"), no_dist=True)
    capsys.readouterr()
    found = inspect_checkpoint(tmp_path / "step-7")
    assert found.model is None and found.naming == "unknown"
    assert found.values["train_state.step"] == 7
    assert found.values["dataloader.odd"].endswith("bytes>")
    assert summarize_values(found.values)["optimizer.param_groups.*.lr"] == 1e-3
    assert "executed" not in capsys.readouterr().out
    assert found.num_values == 5


def test_everything_fits_into_json(folders):
    json.dumps(inspect_checkpoint(folders[0] / "hf").to_json())


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        inspect_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="empty"):
        inspect_checkpoint(tmp_path)


def test_a_safetensors_header_that_begins_like_a_pickle(tmp_path):
    """A header of 640 bytes: the file's first bytes are 80 02, as of a bare pickle."""
    path = tmp_path / "model.safetensors"
    for padding in range(640):
        save_file({"w": torch.zeros(2)}, path, metadata={"note": "x" * padding})
        if path.read_bytes()[:2] == b"\x80\x02":
            break
    assert path.read_bytes()[:8] == (640).to_bytes(8, "little")
    assert inspect_checkpoint(tmp_path).num_parameters == 2
