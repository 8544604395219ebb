"""Random damage to whatever is parsed: it is read as it was, or reported as an error of titan's. No other error."""

import random

import pytest

from converters.common.errors import TitanError
from converters.inspect import inspect_checkpoint
from converters.verify import verify

PARSED = {
    "hf": ("model.safetensors.index.json", "config.json", "model-00001-of-*.safetensors"),
    "dcp": (".metadata", "__0_0.distcp"),
    "meta": ("params.json", "consolidated.00.pth"),
    "torch": ("pytorch_model.bin",),
    "ours_dcp": ("titan_manifest.json", "titan_model.json", ".metadata"),
}
TOKENS = [
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"[",
    b'"',
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"99999999999999999999",
    b"\x80\x04",
    b".",
]


def damage(draw: random.Random, data: bytes) -> bytes:
    """One to three edits: overwritten, cut out, put in, doubled; mostly near the ends, where the headers are."""
    for _ in range(draw.randrange(1, 4)):
        reach = min(len(data), draw.choice((64, 4096, len(data)))) or 1
        place = draw.randrange(reach) if draw.random() < 0.6 else len(data) - 1 - draw.randrange(reach)
        length = draw.choice((1, 1, 2, 8, 100))
        middle = draw.choice(
            (
                bytes(draw.randrange(256) for _ in range(length)),
                b"",
                draw.choice(TOKENS),
                data[place : place + length] * 2,
            )
        )
        data = data[:place] + middle + data[place + length :]
    return data


@pytest.mark.parametrize("kind", PARSED)
def test_only_errors_of_titan_leave(copy_of, kind):
    folder, draw = copy_of(kind), random.Random(0)
    files = [next(folder.glob(pattern)) for pattern in PARSED[kind]]
    for _ in range(75):
        file = draw.choice(files)
        good = file.read_bytes()
        file.write_bytes(damage(draw, good))
        for look in (inspect_checkpoint, verify):
            try:
                look(folder)
            except TitanError as error:
                assert 0 < len(error.message) < 20_000
        file.write_bytes(good)
    assert verify(folder).ok
