"""Resume: an output continues from what its journal recorded if the bytes still match, and from nothing else."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import save_file

import converters.engine.units as units
import converters.store.commit as committing
from converters.common.errors import CheckpointError
from converters.common.names import JOURNAL, MANIFEST
from converters.containers.dcp_write import plan_dcp
from converters.containers.safetensors_write import plan_safetensors
from converters.conversion.execute import execute
from converters.conversion.needs import needed_bytes
from converters.conversion.records import Plan, Run
from converters.engine.copy import DEFAULT_WORKERS
from converters.engine.journal import plan_fingerprint
from converters.engine.read import CatalogReader
from converters.layout.layout import boxes_for_any_mesh
from converters.source.open import open_checkpoint
from converters.store.journal import Journal
from converters.verify import verify
from tests.doors import convert
from tests.models.llama import write as write_llama

BLOCK = 4096


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(units, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(units, "UNIT_BYTES", BLOCK)


@pytest.fixture
def src(tmp_path):
    """Two safetensors files, about 40 blocks."""
    folder = tmp_path / "src"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{n}": torch.randn(64, 64, generator=generator).bfloat16() for n in range(20)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def tree(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(
    src, dst, *, resume=True, stop_after=None, error=KeyboardInterrupt, casts=None, allow_nonfinite=True, **options
):
    """A conversion that can be stopped after some blocks."""
    catalog = open_checkpoint(src)
    casts = casts or {}
    with CatalogReader(catalog) as reader:
        infos = {n: type(i)(casts.get(n, i.dtype), i.shape) for n, i in reader.tensors.items()}
        target = plan_dcp(infos, boxes_for_any_mesh(infos, file_bytes=60_000))
        done = [0]

        class Stopping:
            def __enter__(self):
                return self.advance

            def __exit__(self, *exc_info):
                return False

            def advance(self, num_bytes):
                done[0] += 1
                if done[0] == stop_after:
                    raise error

        plan = Plan(
            source=reader,
            target=target,
            casts=casts,
            write_small_files=lambda folder: (folder / "small").write_text("small") and ["small"],
            catalog=catalog,
            allow_nonfinite=allow_nonfinite,
        )
        return execute(dst, plan, Run(progress=lambda total, what: Stopping(), resume=resume, **options))


def left_of(tmp_path):
    return sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp-"))


@pytest.mark.parametrize("workers", [1, DEFAULT_WORKERS, 4])
def test_an_interrupted_conversion_resumes_to_the_same_bytes(tmp_path, src, workers):
    run(src, tmp_path / "whole", workers=workers)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(src, tmp_path / "out", stop_after=13, workers=workers)
    assert "run again with --resume" in caught.value.__notes__[0]
    assert len(left_of(tmp_path)) == 1 and not (tmp_path / "out").exists()
    done = run(src, tmp_path / "out", workers=workers)
    assert done.resumed_bytes >= 12 * BLOCK
    assert done.remarks == ()  # that it went on, and from where, is in resumed_bytes
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert left_of(tmp_path) == []
    assert not list((tmp_path / "out").rglob(JOURNAL))


def test_without_resume_an_interrupt_leaves_nothing(tmp_path, src):
    with pytest.raises(KeyboardInterrupt) as caught:
        run(src, tmp_path / "out", resume=False, stop_after=13)
    assert not getattr(caught.value, "__notes__", [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_signal_while_a_place_is_claimed_leaves_nothing(tmp_path, src, monkeypatch):
    """It arrives when the claim has a name to be removed by."""
    opened = Journal.__init__

    def open_and_interrupt(journal, path):
        opened(journal, path)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "__init__", open_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "out", resume=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_an_interrupt_before_the_work_begins_leaves_nothing(tmp_path, src, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "out", resume=False, stop_after=13)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_an_error_that_speaks_against_the_work_keeps_nothing(tmp_path, src):
    with pytest.raises(CheckpointError, match="bad"):
        run(src, tmp_path / "out", stop_after=13, error=CheckpointError("bad values"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_regions_that_changed_are_written_again(tmp_path, src):
    """The journal is a claim: a block that was damaged or lost after it was recorded is not trusted."""
    run(src, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "out", stop_after=30)
    (root,) = (tmp_path / name for name in left_of(tmp_path))
    data = sorted((root / "out").glob("*.distcp"))
    raw = bytearray(data[0].read_bytes())
    raw[len(raw) // 2] ^= 1
    data[0].write_bytes(raw)
    data[1].unlink()
    done = run(src, tmp_path / "out")
    assert 0 < done.resumed_bytes < 29 * BLOCK
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["torn", "flipped", "garbage", "empty", "longer file"])
def test_a_damaged_journal_costs_work_and_nothing_else(tmp_path, src, damage):
    run(src, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "out", stop_after=30)
    (root,) = (tmp_path / name for name in left_of(tmp_path))
    journal = (root / JOURNAL).read_bytes()
    lines = journal.splitlines(keepends=True)
    if damage == "torn":
        (root / JOURNAL).write_bytes(journal[:-7])
    elif damage == "flipped":
        lines[9] = lines[9].replace(b'"unit":8', b'"unit":9')
        (root / JOURNAL).write_bytes(b"".join(lines))
    elif damage == "garbage":
        (root / JOURNAL).write_bytes(os.urandom(1000))
    elif damage == "empty":
        (root / JOURNAL).write_bytes(b"")
    else:
        with next((root / "out").glob("*.distcp")).open("ab") as file:
            file.write(b"x" * 1_000_000)
    done = run(src, tmp_path / "out")
    most = {"torn": 29, "flipped": 9, "garbage": 0, "empty": 0, "longer file": 29}[damage]
    assert done.resumed_bytes <= most * BLOCK * 2
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    if not most:
        assert any("nothing to resume" in remark for remark in done.remarks)


def test_small_files_of_an_earlier_attempt_do_not_stay(tmp_path, src):
    run(src, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "out", stop_after=30)
    (root,) = (tmp_path / name for name in left_of(tmp_path))
    (root / "out/small").write_text("a longer text than the one that is written now")
    (root / "out/assets").mkdir()
    (root / "out/assets/old.json").write_text("{}")
    (root / "out" / MANIFEST).write_text("{}")
    run(src, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("change", ["touched", "config", "other cast", "more files"])
def test_a_journal_of_another_plan_is_not_gone_on_from(tmp_path, src, change):
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "out", stop_after=30)
    casts = None
    if change == "touched":
        os.utime(src / "model.safetensors", ns=(1, 1))
    elif change == "config":
        (src / "config.json").write_text('{"head_dim": 8}')
    elif change == "other cast":
        casts = {"t3": "float32"}
    else:
        (src / "another.json").touch()
    done = run(src, tmp_path / "out", casts=casts)
    assert done.resumed_bytes == 0
    assert any("of another plan" in remark for remark in done.remarks)
    assert left_of(tmp_path) == []
    run(src, tmp_path / "whole", casts=casts)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_what_a_kill_left_is_removed_by_the_next_run(tmp_path, src):
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "out", stop_after=30)
    done = run(src, tmp_path / "out", resume=False)
    assert done.resumed_bytes == 0
    assert any("had left was removed" in remark for remark in done.remarks)
    assert left_of(tmp_path) == []


@pytest.mark.parametrize("same_plan", [True, False])
@pytest.mark.parametrize("resume", [True, False])
def test_two_conversions_into_one_place_are_refused(tmp_path, src, same_plan, resume):
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "out", stop_after=30)
    (root,) = (tmp_path / name for name in left_of(tmp_path))
    before = tree(root)
    alive = Journal(root / JOURNAL)  # flock is per open file, so this stands for another process
    try:
        with pytest.raises(CheckpointError, match="another conversion is writing it"):
            run(src, tmp_path / "out", resume=resume, casts=None if same_plan else {"t3": "float32"})
        assert tree(root) == before
        assert left_of(tmp_path) == [root.name]
        run(src, tmp_path / "other")  # another destination does not mind
    finally:
        alive.close()
    run(src, tmp_path / "out")
    assert left_of(tmp_path) == []


def test_a_full_disk_keeps_what_is_written(tmp_path, src):
    error = CheckpointError("disk full", hint="free some")
    error.__cause__ = OSError(28, "No space left on device")
    with pytest.raises(CheckpointError, match="disk full") as caught:
        run(src, tmp_path / "out", stop_after=30, error=error)
    assert "--resume" in caught.value.hint
    assert run(src, tmp_path / "out").resumed_bytes


def test_overwrite_and_resume(tmp_path, src):
    run(src, tmp_path / "out")
    expected = tree(tmp_path / "out")
    (tmp_path / "out/small").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "out", stop_after=30, overwrite=True)
    assert (tmp_path / "out/small").read_text() == "old"
    assert run(src, tmp_path / "out", overwrite=True).resumed_bytes
    assert tree(tmp_path / "out") == expected
    assert left_of(tmp_path) == []


def test_digests_can_be_left_out(tmp_path, src):
    for resume in (False, True):
        catalog = open_checkpoint(src)
        with CatalogReader(catalog) as reader:
            plan = Plan(reader, plan_safetensors(reader.tensors), catalog=catalog)
            execute(tmp_path / "out", plan, Run(digests=False, resume=resume, overwrite=resume))
        manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
        assert {t["digest"] for t in manifest["tensors"].values()} == {""}
        assert verify(tmp_path / "out").ok  # against CRC32s
    data = next((tmp_path / "out").glob("*.safetensors"))
    raw = bytearray(data.read_bytes())
    raw[-5] ^= 1
    data.write_bytes(raw)
    assert not verify(tmp_path / "out").ok


def test_non_finite_values_are_refused_when_asked(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    save_file({"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(3), "c": torch.full((3,), float("inf"))},
              folder / "model.safetensors")  # fmt: skip
    with pytest.raises(CheckpointError, match=r"(?s)2 tensors.*a: 1 value\n.*c: 3 values"):
        run(folder, tmp_path / "out", allow_nonfinite=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]
    assert run(folder, tmp_path / "out").non_finite == {"a": 1, "c": 3}


def test_the_fingerprint_names_the_plan(tmp_path, src):
    catalog = open_checkpoint(src)
    with CatalogReader(catalog) as reader:
        target = plan_safetensors(reader.tensors)
        one = plan_fingerprint(catalog, target, {})
        assert one == plan_fingerprint(open_checkpoint(src), plan_safetensors(reader.tensors), {})
        others = {
            plan_fingerprint(catalog, target, {"t1": "float32"}),
            plan_fingerprint(catalog, target, {}, digests=False),
            plan_fingerprint(catalog, plan_safetensors(reader.tensors, shard_bytes=100_000), {}),
        }
    shutil.copytree(src, tmp_path / "copy")
    others.add(plan_fingerprint(open_checkpoint(tmp_path / "copy"), target, {}))
    assert len({one, *others}) == 5


@pytest.mark.parametrize("resume", [True, False])
def test_what_is_written_already_needs_no_room_again(tmp_path, src, monkeypatch, resume):
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "out", stop_after=30)
    usage, asked = shutil.disk_usage(tmp_path), []
    with monkeypatch.context() as patch:
        patch.setattr(
            "converters.conversion.execute.require_room",
            lambda dst, plan: asked.append(needed_bytes(plan.target, plan.carried)),
        )
        run(src, tmp_path / "whole")
    free = asked[0] - 60_000  # of the 170 kB of data, half is there
    monkeypatch.setattr(committing.shutil, "disk_usage", lambda path: usage._replace(free=free))
    with pytest.raises(CheckpointError, match="free on that disk"):
        run(src, tmp_path / "other")
    run(src, tmp_path / "out", resume=resume)


def test_another_order_of_rows_is_another_plan(tmp_path, monkeypatch):
    """What says the model may lie elsewhere and change: the same shapes, but heads of another size."""
    model = write_llama(tmp_path / "hf", rope_scaling=None).config
    for name, factor in (("message", 1), ("corrected", 2)):
        (tmp_path / name).mkdir()
        heads = {key: getattr(model, key) // factor for key in ("num_attention_heads", "num_key_value_heads")}
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | heads | {"head_dim": model.head_dim * factor}))
    (tmp_path / "hf" / "config.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("converters.conversion.execute.write_manifest", _full_disk)
        with pytest.raises(CheckpointError, match="no space"):
            convert(tmp_path / "hf", tmp_path / "out", to="dcp", model_from=tmp_path / "message", resume=True)
    assert left_of(tmp_path)
    done = convert(tmp_path / "hf", tmp_path / "out", to="dcp", model_from=tmp_path / "corrected", resume=True)
    assert done.resumed_bytes == 0
    convert(tmp_path / "hf", tmp_path / "whole", to="dcp", model_from=tmp_path / "corrected")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def _full_disk(*args, **kwargs):
    raise OSError(28, "no space left")
