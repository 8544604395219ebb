"""Fetch one file over HTTP into a part file: go on behind what is there, and check the whole against the hub's sum."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import BinaryIO

import httpx2
from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import hf_raise_for_status

from converters.errors import CheckpointError
from converters.file_lock import lock_file
from titan_tools.hub.errors import AGAIN

PAUSES_SECS = (1, 2, 4, 8)  # after failures in a row; a byte that arrives starts the row anew
_PASSING_STATUS = (408, 429, 500, 502, 503, 504)
_BLOCK_BYTES = 1 << 20


class Stopped(Exception):
    """Another file failed; what has arrived of this one stays."""


def fetch(
    url: str,
    part: Path,
    *,
    num_bytes: int,
    headers: Mapping[str, str],
    advance: Callable[[int], None],
    stop: Event,
) -> None:
    """Append to `part` what is missing of `num_bytes`. The hub's client has no resuming over processes, so this does.

    Raises httpx2.HTTPError when tries are used up, and CheckpointError where another process fetches the same file.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as file:
        _lock(file, part)
        failures = 0
        while (have := file.seek(0, 2)) < num_bytes:
            try:
                _append(url, file, have, num_bytes=num_bytes, headers=headers, advance=advance, stop=stop)
            except (httpx2.TransportError, HfHubHTTPError) as error:
                passing = not isinstance(error, HfHubHTTPError) or error.response.status_code in _PASSING_STATUS
                failures = 0 if file.seek(0, 2) > have else failures
                if not passing or failures == len(PAUSES_SECS):
                    raise
                if stop.wait(PAUSES_SECS[failures]):
                    raise Stopped from error
                failures += 1
        if have > num_bytes:
            file.truncate(0)
            raise CheckpointError(f"{part}: longer than the hub's file; it was emptied", hint=AGAIN)


def _append(
    url: str,
    file: BinaryIO,
    have: int,
    *,
    num_bytes: int,
    headers: Mapping[str, str],
    advance: Callable[[int], None],
    stop: Event,
) -> None:
    # identity: a compressed answer has other byte positions
    asked = {**headers, "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with get_session().stream("GET", url, headers=asked) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        if have and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            file.truncate(0)  # the server sends all of it again
            advance(-have)
        for block in response.iter_raw():  # as it arrives: what is held back would be lost at a cut
            if stop.is_set():
                raise Stopped
            file.write(block)
            file.flush()  # what has arrived survives a kill
            advance(len(block))
    if file.seek(0, 2) < num_bytes:
        raise httpx2.RemoteProtocolError(f"the server ended the file after {file.tell():,} of {num_bytes:,} bytes")


def _lock(file: BinaryIO, part: Path) -> None:
    try:
        lock_file(file.fileno())
    except BlockingIOError:
        raise CheckpointError(f"{part}: another download is fetching this file now") from None


def check_sum(part: Path, etag: str, *, name: str) -> None:
    """Compare a fetched file with the sum that its ETag is: SHA-256 of large files, git's SHA-1 of small ones.

    Raises CheckpointError, having removed the file. A mirror may have ETags of another kind, which say nothing.
    """
    if re.fullmatch("[0-9a-f]{64}", etag):
        sum_ = hashlib.sha256()
    elif re.fullmatch("[0-9a-f]{40}", etag):
        sum_ = hashlib.sha1(b"blob %d\0" % part.stat().st_size, usedforsecurity=False)
    else:
        return
    with part.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            sum_.update(block)
    if sum_.hexdigest() != etag:
        part.unlink()
        raise CheckpointError(
            f"{name}: what arrived is not what the hub's checksum describes; it was deleted",
            hint="the same command fetches this file anew",
        )
