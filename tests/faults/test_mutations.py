"""Every way a checkpoint goes wrong between two owners, in every format: verify finds it, or a conversion does.

With a manifest all of them are found. Without one, what the container itself cannot know is listed in UNDETECTABLE; the
test holds that list to be exactly that, so that nobody believes in more than there is.
"""

import json
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from converters.common.errors import TitanError
from converters.store.manifest import read_manifest
from converters.verify import verify
from tests.doors import convert

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

INDEX = "model.safetensors.index.json"
NAMES = {
    "hf": ("model.layers.0.self_attn.v_proj.weight", "model.layers.1.self_attn.v_proj.weight", "model.norm.weight"),
    "dcp": ("layers.0.attention.wv.weight", "layers.1.attention.wv.weight", "norm.weight"),
}
NAMES |= {"meta": NAMES["dcp"], "torch": NAMES["hf"]}
MUTATIONS = (
    "delete", "rename", "duplicate", "reshape", "re-dtype", "flip", "truncate", "hole", "stale index", "swap tensors",
    "swap files", "append", "zero a tensor",
)  # fmt: skip
# Without a manifest, what was made anew by the format's own writer, values and all, is a sound checkpoint of another
# model; and safetensors has no sums at all.
UNDETECTABLE = {
    *((kind, "swap tensors") for kind in NAMES),
    *((kind, "zero a tensor") for kind in NAMES),
    # to another floating type, which a model may mix; an index still has the old sum of bytes
    *((kind, "re-dtype") for kind in NAMES if kind != "hf"),
    ("hf", "flip"),
    ("hf", "hole"),
}


def files_of(folder: Path, kind: str) -> list[Path]:
    pattern = {"hf": "*.safetensors", "dcp": "*.distcp", "meta": "*.pth", "torch": "*.bin"}[kind]
    return sorted(folder.glob(pattern))


def rewrite(folder: Path, kind: str, change) -> None:
    """Load everything with the library of the format, change it, save it the same way."""
    if kind == "hf":
        where = {name: file for file in files_of(folder, kind) for name in load_file(file)}
        tensors = {name: load_file(file)[name] for name, file in where.items()}
        change(tensors)
        for file in set(where.values()):
            held = {n: t.contiguous() for n, t in tensors.items() if where.get(n, min(where.values())) == file}
            save_file(held, file, metadata={"format": "pt"})
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = {n: where.get(n, min(where.values())).name for n in tensors}
        (folder / INDEX).write_text(json.dumps(index))
        return
    if kind == "dcp":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
        }
        dcp.load(tensors, checkpoint_id=str(folder), no_dist=True)
        change(tensors)
        for file in files_of(folder, kind):
            file.unlink()
        dcp.save({n: t.contiguous() for n, t in tensors.items()}, checkpoint_id=str(folder), no_dist=True)
        return
    (file,) = files_of(folder, kind)
    tensors = dict(torch.load(file))
    change(tensors)
    torch.save(tensors, file)


def offset_of(folder: Path, kind: str, name: str) -> tuple[Path, int, int]:
    """(file, offset, length) of some of a tensor's bytes."""
    from converters.engine.read import CatalogReader
    from converters.source.open import open_checkpoint

    catalog = open_checkpoint(folder)
    with CatalogReader(catalog) as reader:
        chunk = reader.located(name, catalog.tensors[name].chunks[0])
    return folder / chunk.file, chunk.byte_offset, 4 * chunk.box.num_elements


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)


def mutate(folder: Path, kind: str, mutation: str) -> None:
    one, other, norm = NAMES[kind]

    def swap(tensors):
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()

    changes = {
        "delete": lambda t: t.pop(one),
        "rename": lambda t: t.update({one + "_old": t.pop(one)}),
        "duplicate": lambda t: t.update({one + ".1": t[one].clone()}),
        "reshape": lambda t: t.update({one: t[one].reshape(-1, 8)}),
        "re-dtype": lambda t: t.update({norm: t[norm].half()}),
        "swap tensors": swap,
        "zero a tensor": lambda t: t[one].zero_(),
    }
    if mutation in changes:
        rewrite(folder, kind, changes[mutation])
    elif mutation in ("flip", "hole"):
        file, offset, length = offset_of(folder, kind, one)
        with file.open("rb") as opened:
            opened.seek(offset + length // 2)
            (byte,) = opened.read(1)
        overwrite(file, offset + length // 2, bytes([byte ^ 4]) if mutation == "flip" else bytes(length // 2))
    elif mutation == "truncate":
        file = files_of(folder, kind)[-1]
        file.write_bytes(file.read_bytes()[:-40])
    elif mutation == "append":
        file = files_of(folder, kind)[0]
        file.write_bytes(file.read_bytes() + b"\0" * 8)
    elif mutation == "stale index":  # what says where things lie is of another time than they are
        if kind == "hf":
            index = json.loads((folder / INDEX).read_text())
            names = sorted(index["weight_map"])
            files = [index["weight_map"][name] for name in names]
            index["weight_map"] = dict(zip(names, files[5:] + files[:5], strict=True))
            (folder / INDEX).write_text(json.dumps(index))
        elif kind == "dcp":
            stale = (folder / ".metadata").read_bytes()
            rewrite(folder, kind, lambda t: t.update({norm: t.pop(norm)[: len(t)], "a.first": torch.ones(33)}))
            (folder / ".metadata").write_bytes(stale)
        else:
            config = folder / ("params.json" if kind == "meta" else "config.json")
            key = "n_layers" if kind == "meta" else "num_hidden_layers"
            config.write_text(json.dumps(json.loads(config.read_text()) | {key: 1}))
    else:
        assert mutation == "swap files"
        files = files_of(folder, kind)
        if len(files) > 1:
            first, second = files[:2]
            first.rename(folder / "aside")
            second.rename(first)
            (folder / "aside").rename(second)
        else:  # one file: the same file of a model with one layer less
            rewrite(folder, kind, lambda t: [t.pop(name) for name in list(t) if "layers.1." in name])


def found_by(folder: Path, out: Path) -> bool:
    try:
        report = verify(folder)
        if not report.ok or "with warnings" in report.verdict:
            return True
        convert(folder, out, to="dcp")
    except TitanError:
        return True
    shutil.rmtree(out)
    return False


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("kind", NAMES)
def test_without_a_manifest(copy_of, tmp_path, kind, mutation):
    folder = copy_of(kind)
    assert not found_by(folder, tmp_path / "sound")
    mutate(folder, kind, mutation)
    assert found_by(folder, tmp_path / "out") == ((kind, mutation) not in UNDETECTABLE)
    assert not (tmp_path / "out").exists() and [p for p in tmp_path.iterdir() if p.name.startswith(".tmp-")] == []


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("kind", ["hf", "dcp", "meta"])
def test_with_a_manifest_every_one_is_found(copy_of, tmp_path, kind, mutation):
    folder = copy_of(f"ours_{kind}")
    assert verify(folder).verdict == "all checks passed"
    mutate(folder, kind, mutation)
    assert read_manifest(folder) is not None  # untouched: it is what tells
    assert not verify(folder).ok
    with pytest.raises(TitanError):
        convert(folder, tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["hf", "dcp", "meta"])
def test_files_of_two_checkpoints_mixed(copy_of, sources, tmp_path, kind):
    """Each file whole, each from a checkpoint of titan's, of the same names, shapes and sizes."""
    folder, other = copy_of(f"ours_{kind}"), tmp_path / "other"
    rewrite_like(sources, folder, other, kind)
    mixed = [p.name for p in files_of(folder, kind)]
    shutil.copy(other / mixed[-1], folder / mixed[-1])
    assert (folder / mixed[-1]).stat().st_size == (other / mixed[-1]).stat().st_size
    assert not verify(folder).ok


def rewrite_like(sources: Path, like: Path, out: Path, kind: str) -> None:
    from converters.formats.base import OutputOptions
    from converters.layout.mesh_shape import MeshShape

    source = out.parent / "changed"
    shutil.copytree(sources / "hf_single", source)
    tensors = load_file(source / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, source / "model.safetensors")
    options = {"dcp": OutputOptions(mesh=MeshShape(dp_shard=2)), "hf": OutputOptions(shard_bytes=60_000)}
    convert(source, out, to=kind, options=options.get(kind, OutputOptions()))


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_holes_and_cuts_anywhere(copy_of, kind):
    """50 cuts and 50 runs of zeros at random places of random files, the manifest among them."""
    folder, draw = copy_of(f"ours_{kind}"), random.Random(0)
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size > 1]
    missed = []
    for round_ in range(100):
        file = draw.choice(files)
        good = file.read_bytes()
        place = draw.randrange(len(good))
        if round_ % 2:
            broken = good[:place]
        else:
            length = draw.randrange(1, 4096)
            broken = good[:place] + bytes(len(good[place : place + length])) + good[place + length :]
        file.write_bytes(broken)
        if broken != good and verify(folder).ok:
            missed.append((file.name, place, round_ % 2))
        file.write_bytes(good)
    assert missed == []
