"""Download one file over HTTP into a partial file: resume, retry, and verify the hub's checksum."""

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import BinaryIO

import httpx2
from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

from converters.common.errors import CheckpointError
from converters.store.file_lock import lock_file
from converters.store.hub_checksums import has_content, is_computable
from titan_tools.hub.errors import RESUME

PAUSES_SECS = (1, 2, 4, 8)  # after consecutive failures; a received byte resets the count
_RETRIED_STATUS = (408, 429, 500, 502, 503, 504)


class Stopped(Exception):
    """Another file failed; the partial file of this one is kept."""


def fetch(
    url: str,
    part: Path,
    *,
    num_bytes: int,
    headers: Mapping[str, str],
    advance: Callable[[int], None],
    stop: Event,
) -> None:
    """Append the missing bytes to `part`, up to `num_bytes`. The hub's client cannot resume in a new process.

    Raises httpx2.HTTPError after the last retry, and CheckpointError if another process downloads the same file.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as file:
        _lock(file, part)
        failures = 0
        while (have := file.seek(0, 2)) < num_bytes:
            try:
                _append(url, file, have, num_bytes=num_bytes, headers=headers, advance=advance, stop=stop)
            except (httpx2.TransportError, HfHubHTTPError) as error:
                retry = not isinstance(error, HfHubHTTPError) or error.response.status_code in _RETRIED_STATUS
                failures = 0 if file.seek(0, 2) > have else failures
                if not retry or failures == len(PAUSES_SECS):
                    raise
                if stop.wait(PAUSES_SECS[failures]):
                    raise Stopped from error
                failures += 1
        if have > num_bytes:
            file.truncate(0)
            raise CheckpointError(f"{part}: longer than the hub's file; it was truncated", hint=RESUME)


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
    # identity: byte positions in a compressed response would differ
    request_headers = {**headers, "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with get_session().stream("GET", url, headers=request_headers) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        if have and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            file.truncate(0)  # the server sends the whole file
            advance(-have)
        for block in response.iter_raw():  # as they arrive: buffered bytes would be lost at an interruption
            if stop.is_set():
                raise Stopped
            file.write(block)
            file.flush()  # received bytes survive a kill
            advance(len(block))
    if file.seek(0, 2) < num_bytes:
        raise httpx2.RemoteProtocolError(f"the server ended the file after {file.tell():,} of {num_bytes:,} bytes")


def _lock(file: BinaryIO, part: Path) -> None:
    try:
        lock_file(file.fileno())
    except BlockingIOError:
        raise CheckpointError(f"{part}: another process is downloading this file") from None


def check_sum(path: Path, etag: str, *, name: str) -> None:
    """Compare a downloaded file with its ETag, if that is a checksum.

    Removes the file and raises CheckpointError if they differ.
    """
    if is_computable(etag) and not has_content(path, etag):
        path.unlink(missing_ok=True)
        raise CheckpointError(
            f"{name}: the downloaded file does not match the hub's checksum; it was deleted",
            hint="run the same command again to download this file",
        )
