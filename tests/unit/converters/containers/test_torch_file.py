"""torch files and Meta's single shard: what torch.save wrote is listed and read without torch."""

import io

import pytest
import torch

from converters.common.errors import CheckpointError, UnsupportedError
from converters.engine.read import CatalogReader
from converters.source.open import open_checkpoint
from converters.views.catalog import Value
from tests.unit.converters.samples import raw, read_all, state_dict


def test_reads_what_torch_saved(tmp_path):
    state = state_dict()
    torch.save(state, tmp_path / "model.pt")
    catalog = open_checkpoint(tmp_path / "model.pt")
    assert read_all(catalog) == {fqn: raw(tensor) for fqn, tensor in state.items()}
    with CatalogReader(catalog) as reader:
        assert all(not reader.record_problems(fqn) for fqn in state)


def test_a_state_dict_of_a_module_and_shared_storages(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    module[0].weight = torch.nn.Parameter(torch.randn(4, 3)[1:3])
    torch.save(
        {"model": module.state_dict(), "tied": module[0].weight, "step": 5, "cfg": {"lr": [0.1]}}, tmp_path / "x.pt"
    )
    catalog = open_checkpoint(tmp_path / "x.pt")
    found = read_all(catalog)
    assert found["model.0.weight"] == found["tied"] == raw(module[0].weight)
    assert found["model.1.bias"] == raw(module[1].bias)
    assert catalog.values == {"step": Value(5), "cfg.lr": Value([0.1])}
    with CatalogReader(catalog) as reader:  # as DCP stores it, too: a training state of any container can be resharded
        assert reader.read_value("cfg.lr") == torch.load(io.BytesIO(reader.read_blob("cfg.lr"))) == [0.1]
    assert catalog.planner_data["model.0.weight"] == ("model", "0.weight")


def test_tensors_with_attributes_are_plain_tensors(tmp_path):
    """FSDP1 leaves some on the tensors of a full state dict."""
    weight = torch.randn(3, 2)
    weight._has_been_cloned = True
    torch.save({"weight": weight, "again": weight}, tmp_path / "x.pt")
    assert read_all(open_checkpoint(tmp_path / "x.pt")) == dict.fromkeys(("weight", "again"), raw(weight))


class OwnTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.zeros(2)], "holds a list, not a dict"),
        ({"a": torch.zeros(2), "b": {torch.zeros(1)}}, r"b: holds a tensor, and only plain values are allowed"),
        ({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, "two entries are called 'a.b'"),
        ({"bomb": torch.zeros(1).expand(1 << 20, 1 << 20)}, "overlap"),
        ({"module": torch.nn.Linear(1, 1)}, "refused, it asks for `torch.nn"),
        ({"sparse": torch.eye(2).to_sparse()}, "holds a sparse tensor, which is not covered"),
        ({"own": torch.zeros(2).as_subclass(OwnTensor)}, "OwnTensor"),
    ],
)
def test_what_is_no_dict_of_tensors_is_refused(tmp_path, value, message):
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        open_checkpoint(tmp_path / "x.pt")


def test_tensors_in_lists_have_their_places_as_names(tmp_path):
    """Lightning keeps the states of its optimizers in a list."""
    states = [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}]
    torch.save({"w": torch.zeros(2), "optimizer_states": states, "numbers": [1, 2]}, tmp_path / "x.pt")
    catalog = open_checkpoint(tmp_path / "x.pt")
    assert list(catalog.tensors) == ["w", "optimizer_states.0.state.0.exp_avg"]
    assert catalog.values["numbers"].plain == [1, 2]


def test_a_legacy_file_is_refused_with_the_way_out(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="legacy torch file") as caught:
        open_checkpoint(tmp_path / "x.pt")
    assert "torch.save" in caught.value.hint


def test_every_cut_is_noticed(tmp_path):
    torch.save({"a": torch.arange(40.0)}, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    for length in range(0, len(data), 37):
        (tmp_path / "cut.pt").write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "cut.pt")


def test_a_flipped_bit_in_the_data_is_found_by_its_crc(tmp_path):
    torch.save({"a": torch.zeros(400), "b": torch.zeros(3)}, tmp_path / "x.pt")
    catalog = open_checkpoint(tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[catalog.tensors["a"].chunks[0].byte_offset + 100] ^= 4
    (tmp_path / "x.pt").write_bytes(data)
    with CatalogReader(open_checkpoint(tmp_path / "x.pt")) as reader:
        assert reader.record_problems("b") == []
        (problem,) = reader.record_problems("a")
        assert "a at [0] in x.pt" in problem
