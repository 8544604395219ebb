"""A dry run: everything checked, the needs reported, nothing written; also of models that no disk here could hold."""

import base64
import shutil

import pytest

from converters.common.errors import CheckpointError
from converters.conversion import execute
from converters.conversion.needs import COPY_BYTES_PER_SEC, WORKER_BYTES
from converters.engine.copy import DEFAULT_WORKERS
from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama


# `titan` as it is started, and the kernel's account of the process when it is done
@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, vocab_size=302)
    return folder


@pytest.mark.parametrize(
    ("to", "dst", "options"),
    [
        ("dcp", "out", OutputOptions(mesh=MeshShape(dp_shard=3, tp=2))),
        ("hf", "out", OutputOptions(shard_bytes=30_000)),
        ("torch", "out.pt", OutputOptions()),
    ],
)
def test_it_describes_what_the_real_run_does(hf, to, dst, options, tmp_path):
    planned = convert(hf, tmp_path / dst, to=to, options=options, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    free = shutil.disk_usage(tmp_path).free
    done = convert(hf, tmp_path / dst, to=to, options=options)
    assert done.needs is None
    place = tmp_path / dst
    files = [place] if place.is_file() else [p for p in place.iterdir() if p.suffix != ".json" or "index" in p.name]
    files = [p for p in files if p.is_file()]
    assert planned.num_bytes == sum(p.stat().st_size for p in files)
    written = place.stat().st_size if place.is_file() else sum(p.stat().st_size for p in place.rglob("*"))
    assert written <= planned.needs.disk_bytes < written + 2**20
    assert planned.num_files == len(files)
    assert abs(planned.needs.free_bytes - free) < 2**30 and planned.needs.fits


def test_workers_and_chunks_cost_memory_and_bytes_cost_time(hf, tmp_path):
    def needs(**options):
        return convert(hf, tmp_path / "out", to="dcp", dry_run=True, **options).needs

    plain, many = needs(), needs(workers=DEFAULT_WORKERS + 3)
    assert many.memory_bytes - plain.memory_bytes == 3 * WORKER_BYTES
    assert plain.memory_bytes < (128 + 16 * DEFAULT_WORKERS) * 2**20
    cut = needs(options=OutputOptions(mesh=MeshShape(dp_shard=32, tp=2)))
    assert cut.memory_bytes > plain.memory_bytes and cut.secs > plain.secs
    assert plain.bytes_per_sec == COPY_BYTES_PER_SEC and plain.secs > plain.disk_bytes / COPY_BYTES_PER_SEC


@pytest.mark.parametrize("way", ["dcp", "out.pt", "reshard"])
def test_a_dry_run_says_that_it_fits_exactly_where_a_real_one_starts(hf, way, tmp_path, monkeypatch):
    convert(hf, tmp_path / "src", to="dcp")

    def run(dry_run):
        if way == "reshard":
            return reshard(tmp_path / "src", tmp_path / "out", num_files=3, dry_run=dry_run)
        return convert(hf, tmp_path / way, to="torch" if way == "out.pt" else way, dry_run=dry_run)

    usage, needs = shutil.disk_usage(tmp_path), run(True).needs
    assert needs.fits and needs.disk_bytes < 2**20 + sum(p.stat().st_size for p in (tmp_path / "src").rglob("*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needs.disk_bytes - 1))
    assert not run(True).needs.fits
    with pytest.raises(CheckpointError, match="free on that disk"):
        run(False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needs.disk_bytes))
    assert run(True).needs.fits
    run(False)


def test_room_is_reckoned_for_all_that_is_written_until_the_end(tmp_path, monkeypatch):
    """Many small chunks, a large tokenizer to be translated, and the journal, which is gone afterwards."""
    write_llama(tmp_path / "hf", vocab_size=800, num_hidden_layers=12, rope_scaling=None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hf" / name).unlink()
    ranks = [bytes([byte]) for byte in range(256)] + [bytes([97 + n // 26, 97 + n % 26]) for n in range(244)]
    lines = (f"{base64.b64encode(rank).decode()} {number}\n" for number, rank in enumerate(ranks))
    (tmp_path / "hf" / "tokenizer.model").write_text("".join(lines))
    held, sealed = [], execute.write_manifest

    def write_manifest(output, **sums):
        sealed(output, **sums)
        held.append(sum(path.stat().st_size for path in output.folder.parent.rglob("*") if path.is_file()))

    monkeypatch.setattr(execute, "write_manifest", write_manifest)
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=2, tp=2, pp=4)))
    for to in ("hf", "meta", "torchtune"):
        planned = convert(tmp_path / "dcp", tmp_path / f"to-{to}", to=to, dry_run=True)
        convert(tmp_path / "dcp", tmp_path / f"to-{to}", to=to)
        assert held[-1] <= planned.needs.disk_bytes < 1.5 * held[-1] + 2**18


def test_a_full_disk_is_reported_and_no_error(hf, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    needs = convert(hf, tmp_path / "out", to="dcp", dry_run=True).needs
    assert (needs.free_bytes, needs.fits) == (10_000, False)


def test_a_place_that_takes_no_files_is_an_error(hf):
    with pytest.raises(CheckpointError, match="is not writable"):
        convert(hf, "/proc/out", to="dcp", dry_run=True)
