"""Single bit flips over all files of a checkpoint, the manifest included: every one is found."""

import random

import pytest

from converters.verify import verify


@pytest.mark.parametrize("num_flips", [30, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["ours_dcp", "ours_hf"])
def test_every_flip_is_found(copy_of, kind, num_flips):
    """Drawn over bytes and over files, so that small files get their share."""
    folder, draw = copy_of(kind), random.Random(1)
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size}
    by_bytes = draw.choices(list(files), weights=[len(data) for data in files.values()], k=num_flips // 2)
    by_files = draw.choices(list(files), k=num_flips // 2)
    missed = []
    for path in by_bytes + by_files:
        data = files[path]
        place, bit = draw.randrange(len(data)), draw.randrange(8)
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([data[place] ^ (1 << bit)]))
        if verify(folder).ok:
            missed.append((path.name, place, bit))
        with path.open("r+b") as file:
            file.seek(place)
            file.write(data[place : place + 1])
    assert missed == []
    assert verify(folder).verdict == "all checks passed"
