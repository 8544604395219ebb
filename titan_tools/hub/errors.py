"""What goes wrong with a hub, in the words of the one who asked for a model."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from converters.errors import CheckpointError

AGAIN = "the same command goes on where this one stopped"
_LOG_IN = ("hf auth login", "HF_TOKEN=hf_… titan download …")


@contextmanager
def told_plainly(repository: str, revision: str, *, token: str | None) -> Iterator[None]:
    """Turns what the hub's client raises inside the block into CheckpointErrors."""
    try:
        yield
    except (HfHubHTTPError, httpx2.HTTPError, OSError, HFValidationError, EntryNotFoundError, ImportError) as error:
        told = _told(error, repository, revision, has_token=bool(token or get_token()))
        if told is None:
            raise
        raise told from error


def _told(error: Exception, repository: str, revision: str, *, has_token: bool) -> CheckpointError | None:
    page = f"{constants.ENDPOINT}/{repository}"
    match error:
        case HFValidationError():
            return CheckpointError(
                f"{repository!r} is not a repository's name",
                hint="it is written owner/name, as in the address of its page",
                tries=["titan download meta-llama/Llama-3.2-1B"],
            )
        case OfflineModeIsEnabled():
            return CheckpointError(
                f"{repository}: HF_HUB_OFFLINE is set, so nothing is fetched",
                hint=f"what was fetched before lies in {constants.HF_HUB_CACHE}, and every command reads it there",
                tries=[f"HF_HUB_OFFLINE=0 titan download {repository}"],
            )
        case GatedRepoError():
            return CheckpointError(
                f"{repository}: its owner grants access one by one, and "
                + ("the account of this token has none (yet)" if has_token else "no token was sent"),
                hint=f"log in at {page}, accept the terms and wait for the approval"
                + ("; a fine-grained token must also be allowed to read gated repositories" if has_token else ""),
                tries=() if has_token else _LOG_IN,
            )
        case DisabledRepoError():
            return CheckpointError(f"{repository}: the hub has disabled it", hint=f"its page says why: {page}")
        case RevisionNotFoundError():
            return CheckpointError(
                f"{repository}: has no branch, tag or commit {revision!r}", hint=f"they are listed at {page}/tree/main"
            )
        case RepositoryNotFoundError():
            return CheckpointError(
                f"{repository}: the hub knows no such model"
                + (", or this token may not see it" if has_token else ", or it is private: no token was sent"),
                hint=f"is the name spelled as in the address of its page? {page}",
                tries=() if has_token else _LOG_IN,
            )
        case HfHubHTTPError():
            return _of_status(error, repository)
        case LocalEntryNotFoundError():  # what the client makes of a hub that does not answer any more
            return _of_connection(error.__cause__ or error)
        case EntryNotFoundError():
            return CheckpointError(f"{repository}: a file that it lists is gone", hint="was it changed just now?")
        case FileMetadataError():
            return CheckpointError(
                f"{constants.ENDPOINT}: does not answer like a Hugging Face hub", hint="is HF_ENDPOINT right?"
            )
        case httpx2.ProxyError():
            return CheckpointError(
                f"{constants.ENDPOINT}: the proxy refuses ({error})", hint=f"HTTPS_PROXY names it; then {AGAIN}"
            )
        case ImportError() if "SOCKS" in str(error):
            return CheckpointError(
                f"{constants.ENDPOINT}: the proxy is a SOCKS proxy, for which the package socksio is missing",
                hint="ALL_PROXY or HTTPS_PROXY names it; an http:// proxy needs no package",
                tries=["pip install socksio"],
            )
        case httpx2.HTTPError():
            return _of_connection(error)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return CheckpointError(f"{error.filename or 'the disk'}: {error.strerror}", hint=f"make room; then {AGAIN}")
    return None  # a fault of the machine or of titan: the command line tells those


def _of_connection(error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{constants.ENDPOINT}: the connection fails ({str(error) or type(error).__name__})",
        hint=f"is there a network, or a proxy that HTTPS_PROXY should name? Once there is, {AGAIN}",
    )


def _of_status(error: HfHubHTTPError, repository: str) -> CheckpointError:
    status = error.response.status_code
    why = error.server_message or error.response.reason_phrase
    hints = {
        401: "the token is wrong or has expired; a new one: https://huggingface.co/settings/tokens",
        403: "the token may not read this repository; its rights: https://huggingface.co/settings/tokens",
        429: "too many requests; wait some minutes. With a token the limit is higher",
    }
    hint = hints.get(status, f"that is the hub's side; later, {AGAIN}" if status >= 500 else "")
    return CheckpointError(f"{repository}: the hub answers {status} ({why})", hint=hint)
