"""Parse strictly, and build, zips with uncompressed entries, the only kind that torch.save writes.

Strictly: one central directory at the end, entries that follow each other from byte 0 without overlap, no compression
(zip bombs), plain relative names. Deviations that Python's zipfile tolerates are errors.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from converters.common.crc import crc32
from converters.common.errors import CheckpointError

ReadAt = Callable[[int, int], bytes]  # (offset, length) → bytes of the zip

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_MAX_DIRECTORY_BYTES = 256 << 20
_BIG = 0xFFFFFFFF
_STREAMED = 0x0008  # sizes and CRC are in the central directory and a descriptor after the data, as torch writes them
_UTF8 = 0x0800
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One stored entry. `crc32` is 0 if the writer did not compute it."""

    name: str
    data_offset: int
    size: int
    crc32: int


def read_zip(read_at: ReadAt, size: int, *, what: str) -> dict[str, ZipRecord]:
    """The entries of a zip of `size` bytes, by name, in file order. Raises CheckpointError for any irregularity."""

    def refuse(reason: str, hint: str = "") -> CheckpointError:
        return CheckpointError(f"{what}: {reason}", hint=hint or "the file is truncated, damaged or manipulated")

    directory_offset, directory_bytes, num_entries = _find_directory(read_at, size, refuse)
    directory = read_at(directory_offset, directory_bytes)
    records: dict[str, ZipRecord] = {}
    position = end_of_last = 0
    for _ in range(num_entries):
        if position + _CENTRAL.size > len(directory):
            raise refuse("the zip directory is truncated")
        magic, _, _, flags, method, _, _, crc, stored, length, name_len, extra_len, comment_len, disk, _, _, offset = (
            _CENTRAL.unpack_from(directory, position)
        )
        raw_name = directory[position + _CENTRAL.size :][:name_len]
        extra = directory[position + _CENTRAL.size + name_len :][:extra_len]
        position += _CENTRAL.size + name_len + extra_len + comment_len
        if magic != b"PK\x01\x02" or position > len(directory):
            raise refuse("the zip directory is damaged")
        name = _checked_name(raw_name, refuse)
        if flags & 1:
            raise refuse(f"entry {name!r} is encrypted")
        if method != 0:
            raise refuse(f"entry {name!r} is compressed", "torch.save never compresses; a zip bomb does")
        length, stored, offset = _widen(extra, length, stored, offset)
        if stored != length or disk != 0:
            raise refuse(f"entry {name!r} has two sizes")
        if name in records:
            raise refuse(f"entry {name!r} appears twice")
        if offset != end_of_last:
            raise refuse(f"entry {name!r} overlaps another one or leaves a gap")
        data_offset = _check_local(read_at, offset, raw_name, flags, crc, length, refuse)
        end_of_last = data_offset + length
        if end_of_last > directory_offset:
            raise refuse(f"entry {name!r} overlaps the zip directory")
        if flags & _STREAMED:  # without this check, data that a damaged header moves would fit
            descriptor = _descriptor(crc, length, is_wide=_wide_values(extra) is not None)
            if read_at(end_of_last, len(descriptor)) == descriptor:
                end_of_last += len(descriptor)
            elif length:
                raise refuse(f"entry {name!r} and its data descriptor disagree")
        records[name] = ZipRecord(name, data_offset, length, crc)
    if position != len(directory) or directory_offset != end_of_last:
        raise refuse("the zip holds bytes that belong to no entry")
    return records


def _find_directory(read_at: ReadAt, size: int, refuse: Callable[..., CheckpointError]) -> tuple[int, int, int]:
    if size < _END.size:
        raise refuse(f"{size} bytes are too few for a zip")
    end_offset = size - _END.size
    magic, disk, first_disk, here, total, num_bytes, offset, comment = _END.unpack(read_at(end_offset, _END.size))
    if magic != b"PK\x05\x06" or comment:
        raise refuse("no zip directory at the end")
    if disk or first_disk or here != total:
        raise refuse("a zip over several disks")
    limit = end_offset
    locator_offset = end_offset - _LOCATOR64.size
    if locator_offset >= 0:
        magic, _, end64_offset, _ = _LOCATOR64.unpack(read_at(locator_offset, _LOCATOR64.size))
        if magic == b"PK\x06\x07":
            if end64_offset != locator_offset - _END64.size:
                raise refuse("two zip directories, or one in the wrong place")
            end64 = _END64.unpack(read_at(end64_offset, _END64.size))
            if end64[0] != b"PK\x06\x06" or end64[6] != end64[7]:
                raise refuse("the zip64 directory is damaged")
            for narrow, wide, full in (
                (total, end64[7], 0xFFFF),
                (num_bytes, end64[8], _BIG),
                (offset, end64[9], _BIG),
            ):
                if narrow not in (wide, full):
                    raise refuse("the two zip directories disagree")
            total, num_bytes, offset, limit = end64[7], end64[8], end64[9], end64_offset
    if offset + num_bytes != limit:
        raise refuse("two zip directories, or one in the wrong place")
    if num_bytes > _MAX_DIRECTORY_BYTES:
        raise refuse(f"a zip directory of {num_bytes:,} bytes")
    return offset, num_bytes, total


def _checked_name(raw: bytes, refuse: Callable[..., CheckpointError]) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise refuse(f"entry name {raw!r} is not UTF-8") from None
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or ":" in name or any(part in ("", ".", "..") for part in parts):
        raise refuse(f"entry name {name!r} is a path out of the archive")
    return name


def _widen(extra: bytes, length: int, stored: int, offset: int) -> tuple[int, int, int]:
    """Replace saturated 4-byte fields by the 8-byte values of the zip64 extra field."""
    wide = _wide_values(extra) or []
    values = [wide.pop(0) if value == _BIG and wide else value for value in (length, stored, offset)]
    return values[0], values[1], values[2]


def _wide_values(extra: bytes) -> list[int] | None:
    """The 8-byte values of the zip64 extra field; None if there is no such field."""
    values = None
    while len(extra) >= 4:
        kind, num = struct.unpack_from("<2H", extra)
        if kind == 1:
            values = list(struct.unpack_from(f"<{min(num, len(extra) - 4) // 8}Q", extra, 4))
        extra = extra[4 + num :]
    return values


def _check_local(
    read_at: ReadAt,
    offset: int,
    raw_name: bytes,
    flags: int,
    crc: int,
    length: int,
    refuse: Callable[..., CheckpointError],
) -> int:
    header = read_at(offset, _LOCAL.size + len(raw_name))
    if len(header) < _LOCAL.size + len(raw_name):
        raise refuse("a zip entry is beyond the end")
    magic, _, local_flags, method, _, _, local_crc, _, local_length, name_len, extra_len = _LOCAL.unpack_from(header)
    same = magic == b"PK\x03\x04" and method == 0 and local_flags == flags and header[_LOCAL.size :] == raw_name
    if not same or name_len != len(raw_name):
        raise refuse(f"entry {raw_name!r} and the zip directory disagree")
    if not flags & _STREAMED and (local_crc != crc or local_length not in (length, _BIG)):
        raise refuse(f"entry {raw_name!r} and the zip directory disagree about its size or CRC")
    return offset + _LOCAL.size + int(name_len) + int(extra_len)


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """An entry to be written. `data` is None if the caller writes its `size` bytes."""

    name: str
    size: int
    data: bytes | None = None


def small_entry(name: str, data: bytes) -> ZipEntry:
    """An entry with its data."""
    return ZipEntry(name, len(data), data)


def zip_shell(before: Sequence[tuple[str, bytes]], name: str, size: int, crc: int) -> tuple[bytes, bytes]:
    """(head, tail) such that head + `size` bytes of data with CRC32 `crc` + tail is a stored zip.

    `before` are small entries; the data of the last one, `name`, is aligned. See `zip_pieces`.
    """
    entries = [*(small_entry(entry, data) for entry, data in before), ZipEntry(name, size)]
    (_, head), (_, tail) = zip_pieces(entries, lambda number: crc)
    return head, tail


def zip_pieces(
    entries: Sequence[ZipEntry], crc32_of: Callable[[int], int], *, streamed: bool = False
) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of everything in a stored zip but the data that the caller writes into the gaps, in order.

    One piece before each such data, which starts at a multiple of 64, and one after the last. `crc32_of(n)` is the
    CRC32 of the n-th such data. Offsets and lengths do not depend on it, so the data can be written first and the
    pieces afterwards. If `streamed`, the CRC32 follows the data in a data descriptor, as in torch's own files:
    `crc32_of(n)` is called after the piece before that data was yielded, so everything can be written in order.
    """
    piece, start, central, number = bytearray(), 0, bytearray(), 0
    for entry in entries:
        offset = start + len(piece)
        raw = entry.name.encode()
        big = entry.size >= _BIG
        far = offset >= _BIG
        is_streamed = streamed and entry.data is None
        wide = struct.pack("<2Q", entry.size, entry.size) if big else b""
        far_wide = wide + (struct.pack("<Q", offset) if far else b"")
        narrow = _BIG if big else entry.size
        extra = _wide_field(
            far_wide if is_streamed else wide
        )  # torch has offsets there, too: descriptors are wide then
        if entry.data is None:
            room = -(offset + _LOCAL.size + len(raw) + len(extra)) % _ALIGN
            if room:  # torch aligns like this: a field named FB; an extra field takes at least 4 bytes
                room += _ALIGN if room < 4 else 0
                extra += struct.pack("<2sH", b"FB", room - 4) + b"Z" * (room - 4)
        central_extra = _wide_field(far_wide)
        common = (45 if big or far else 20, _UTF8 | (_STREAMED if is_streamed else 0), 0, 0, 0)
        if is_streamed:
            sums = (0, 0, 0)  # of which the size is known, but torch and the zip format want zeros here
        else:
            sums = (crc32_of(number) if entry.data is None else crc32(entry.data), narrow, narrow)
        piece += _LOCAL.pack(b"PK\x03\x04", *common, *sums, len(raw), len(extra)) + raw + extra
        if entry.data is None:
            yield start, bytes(piece)
            piece, start = bytearray(), start + len(piece) + entry.size
            if is_streamed:
                sums = (crc32_of(number), narrow, narrow)
                piece += _descriptor(sums[0], entry.size, is_wide=bool(far_wide))
            number += 1
        else:
            piece += entry.data
        central += _CENTRAL.pack(
            b"PK\x01\x02", common[0], *common, *sums, len(raw), len(central_extra), 0, 0, 0, 0, min(offset, _BIG)
        )  # fmt: skip
        central += raw + central_extra
    directory = _directory(bytes(central), start + len(piece), len(entries))
    yield start, bytes(piece) + directory


def _descriptor(crc: int, size: int, *, is_wide: bool) -> bytes:
    """The data descriptor of a streamed entry."""
    return struct.pack("<4sI2Q" if is_wide else "<4s3I", b"PK\x07\x08", crc, size, size)


def _wide_field(values: bytes) -> bytes:
    """The zip64 extra field; empty if it is not needed."""
    return struct.pack("<2H", 1, len(values)) + values if values else b""


def _directory(central: bytes, offset: int, count: int) -> bytes:
    end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, len(central), offset)
    locator = _LOCATOR64.pack(b"PK\x06\x07", 0, offset + len(central), 1)
    narrow = min(count, 0xFFFF)
    end = _END.pack(b"PK\x05\x06", 0, 0, narrow, narrow, len(central), min(offset, _BIG), 0)
    return central + end64 + locator + end
