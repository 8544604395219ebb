"""Run tests of folders in the pretend store, too: what they name is uploaded before a call, and downloaded after it.

A path stands for the location with the same text behind the scheme, so that tests need not know where they run, and
stock readers open what was written to the store.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from converters.store.location import Location
from tests.pretend_store import FOREVER, INDEX, LAG, ROOT, SCHEME, UNFINISHED, Objects, key_of

STORES = ("folder", SCHEME)
SLOW_STORES = ("folder", pytest.param(SCHEME, marks=pytest.mark.slow))

# Tests that do not apply to a store, by file and name, with the reason; test_uploaded.py holds their number down
OF_FOLDERS = {
    "unit/converters/test_verify.py::test_any_flipped_bit_is_found": "hundreds of uploads",
    "unit/converters/test_inspect.py::test_what_is_no_checkpoint": "a store has no empty folders",
    "unit/converters/test_convert_torch.py::test_only_a_torch_file_is_replaced": "a store has no empty folders",
    "unit/converters/test_convert_torch.py::test_a_file_is_there_whole_or_not_at_all": "a store keeps whole files",
    "unit/converters/test_convert.py::test_memory_stays_below_the_model_s_size": "the test itself holds the upload",
    "unit/converters/test_reshard.py::test_an_interrupted_reshard_resumes_to_the_same_bytes": "a store keeps whole "
    "files; test_pretend_outputs.py resumes them",
    "dist/test_resume.py::test_nothing_good_to_load_is_an_error_on_every_rank": "a store has no empty folders",
    "dist/test_resume.py::test_a_disk_without_room_is_reported_before_the_first_step": "the store is on no disk",
    "dist/test_async_checkpoint.py::test_old_steps_go_only_when_the_new_one_is_there": "it watches the folder",
}


def at_store(path: Path) -> Location:
    """The location in the store that stands for a path."""
    return Location(f"{SCHEME}://{path.absolute()}")


def upload(path: Path, *, is_listed: bool = True) -> Location:
    """Upload a folder, or the folder of a file, in place of what the store has there. Returns the path's location."""
    folder, objects = path.parent if path.is_file() else path, Objects()
    prefix = f"{key_of(at_store(folder))}/"
    wanted = {prefix + file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    for key in objects.present(prefix) - wanted.keys():  # with the index
        objects.delete(key)
    for key, file in wanted.items():
        data = file.read_bytes()
        if objects.size(key) != len(data) or objects.read(key, 0, len(data)) != data:
            objects.put_bytes(key, data)
    if is_listed:  # tests name files that only a list can tell
        objects.catch_up(prefix)
    return at_store(path)


def download(path: Path) -> None:
    """Make a folder, or a file, of what the store has at the path's location."""
    objects, key = Objects(), key_of(at_store(path))
    keys = [each for each in objects.present(f"{key}/") if not each.endswith((INDEX, UNFINISHED))]
    names = {each: path / each.removeprefix(f"{key}/") for each in keys}
    names |= {key: path} if objects.size(key) is not None else {}
    if path.is_dir():
        shutil.rmtree(path)
    for each, file in names.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(objects.read(each, 0, objects.size(each)))


# Modules whose tests run in a folder and in the store
MODULES = (
    "unit/converters/test_convert.py",
    "unit/converters/test_convert_torch.py",
    "unit/converters/test_convert_allowed.py",
    "unit/converters/test_reshard.py",
    "unit/converters/test_verify.py",
    "unit/converters/test_diff.py",
    "unit/converters/test_inspect.py",
    "unit/trainer/test_seed.py",
    "dist/test_resume.py",
    "dist/test_async_checkpoint.py",
)


def in_store(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
) -> bool:
    """Run a test in the store `request.param`: functions of its module get locations for paths.

    `reads` take checkpoints only; the second argument of `writes` is where they write. Returns whether it is one.
    """
    if request.param == "folder":
        return False
    assert request.path.relative_to(Path(__file__).parent).as_posix() in MODULES
    name = f"{request.path.relative_to(Path(__file__).parent).as_posix()}::{request.node.originalname}"
    if reason := OF_FOLDERS.get(name):
        pytest.skip(reason)
    monkeypatch.setenv(ROOT, str(request.getfixturevalue("tmp_path_factory").mktemp("pretend")))
    monkeypatch.setenv(LAG, str(FOREVER))
    for function in (*reads, *writes):
        call = _call_and_write if function in writes else _call
        monkeypatch.setattr(request.module, function, partial(call, getattr(request.module, function)))
    return True


def _call(function: Callable[..., Any], /, *places: Any, **options: Any) -> Any:
    named = {key: _uploaded(value) if key == "model_from" else value for key, value in options.items()}
    if (output := named.get("options")) is not None and getattr(output, "scales_from", None) is not None:
        named["options"] = replace(output, scales_from=_uploaded(output.scales_from))
    return function(*map(_uploaded, places), **named)


def _call_and_write(function: Callable[..., Any], source: Any, destination: Any, /, **options: Any) -> Any:
    path = Path(destination)
    if path.exists():
        upload(path)
    try:
        return _call(function, source, at_store(path), **options)
    finally:
        if not options.get("dry_run"):
            download(path)


def _uploaded(value: Any) -> Any:
    return upload(Path(value)) if isinstance(value, str | Path) and Path(value).exists() else value


def runs_in_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test whose runs save to the store `request.param`, whose lists show nothing that ranks change."""
    if not in_store(request, monkeypatch):
        return
    from tests.dist import runs
    from tests.dist.pool import Pool

    run = Pool.run

    def in_the_store(pool: Pool, case: Callable[..., Any], config: Any, *arguments: Any) -> list[Any]:
        folder, settings = Path(config.job.dump_folder) / config.checkpoint.folder, config.checkpoint
        if folder.exists():
            upload(folder)
        initial = settings.initial_load_path and str(_uploaded(settings.initial_load_path))
        settings = replace(settings, folder=str(at_store(folder)), initial_load_path=initial)
        config = replace(config, checkpoint=settings)
        try:
            return run(pool, runs.in_store, Path(os.environ[ROOT]), case, config, *arguments)
        finally:
            download(folder)

    monkeypatch.setattr(Pool, "run", in_the_store)
