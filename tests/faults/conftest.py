"""Sources to damage, the command line in this process, and a watch over what a process opens and runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from tests.doors import convert
from tests.models.llama import write as write_llama
from tests.models.llama import write_meta

INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"
DATA = {"hf": "*-of-*.safetensors", "hf_single": "*.safetensors", "dcp": "*.distcp", "meta": "*.pth", "torch": "*.bin"}


@pytest.fixture(scope="module", autouse=True)
def two_layers():
    """The flavor of runs.make_config, as processes of tests/dist know it."""
    from tests.dist import runs

    with runs.two_layers():
        yield


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> Path:
    """hf (sharded, with an index), hf_single, dcp (stock), meta, torch: one tiny Llama each, none with a manifest.

    And `ours_*`: what titan makes of it, with one.
    """
    folder = tmp_path_factory.mktemp("faults")
    model = write_llama(folder / "hf_single", vocab_size=302, rope_scaling=None)
    model.save_pretrained(folder / "hf", max_shard_size="60KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "hf_single" / name, folder / "hf")
    write_meta(folder / "meta", model)
    native = torch.load(folder / "meta" / "consolidated.00.pth")
    dcp.save(native, checkpoint_id=str(folder / "dcp"), no_dist=True)
    (folder / "torch").mkdir()
    torch.save(model.state_dict(), folder / "torch" / "pytorch_model.bin")
    for name in ("dcp", "torch"):
        shutil.copy(folder / "hf_single" / "config.json", folder / name)
    mesh = OutputOptions(mesh=MeshShape(dp_shard=2))
    convert(folder / "hf_single", folder / "ours_dcp", to="dcp", options=mesh)
    convert(folder / "hf_single", folder / "ours_hf", to="hf", options=OutputOptions(shard_bytes=60_000))
    convert(folder / "hf_single", folder / "ours_meta", to="meta")
    return folder


@pytest.fixture
def copy_of(sources, tmp_path):
    """`copy_of("hf")`: a fresh copy of a source to damage."""

    def copy(kind: str) -> Path:
        return shutil.copytree(sources / kind, tmp_path / f"{kind}-copy")

    return copy


@pytest.fixture
def index(copy_of):
    """(folder, weight_map, write): an HF folder and a way to rewrite its index."""
    folder = copy_of("hf")
    content = json.loads((folder / INDEX).read_text())

    def write(weight_map, **metadata):
        content["weight_map"] = weight_map
        content["metadata"] |= metadata
        (folder / INDEX).write_text(json.dumps(content))

    return folder, content["weight_map"], write


@pytest.fixture
def refused(titan, tmp_path):
    """Convert must refuse `source`: exit 2, an `error:` that holds every part, and not one byte written."""

    def check(source: Path, *parts: str, to: str = "dcp", options: tuple[str, ...] = ()) -> str:
        before = sorted(p.name for p in tmp_path.iterdir())
        code, out, err = titan("convert", "auto", source, tmp_path / "out", "--to", to, *options)
        assert code == 2 and out == "" and err.startswith("error: "), (code, out, err)
        assert [part for part in parts if part not in err] == [], err
        assert sorted(p.name for p in tmp_path.iterdir()) == before, "something was left behind"
        return err

    return check


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A token index for tiny runs."""
    from tests.dist import runs

    return runs.make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The dump folder of an FSDP run of two ranks that nothing happened to."""
    from tests.dist import runs
    from tests.dist.processes import ranks

    dump = tmp_path_factory.mktemp("whole")
    with ranks(runs.make_config(data, dump, **runs.FSDP2), 2, dump) as running:
        assert [ended.exit_code for ended in running.wait().values()] == [0, 0]
    return dump
