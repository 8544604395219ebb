"""Turn errors of the hub's client into CheckpointErrors that name the cause and the fix."""

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

from converters.common.errors import CheckpointError

RESUME = "run the same command again to resume"
_LOG_IN = ("hf auth login", "HF_TOKEN=hf_… titan download …")


@contextmanager
def hub_errors(repository: str, revision: str, *, token: str | None) -> Iterator[None]:
    """Convert exceptions of the hub's client inside the block into CheckpointErrors."""
    try:
        yield
    except (HfHubHTTPError, httpx2.HTTPError, OSError, HFValidationError, EntryNotFoundError, ImportError) as error:
        known = _explain(error, repository, revision, has_token=bool(token or get_token()))
        if known is None:
            raise
        raise known from error


def _explain(error: Exception, repository: str, revision: str, *, has_token: bool) -> CheckpointError | None:
    page = f"{constants.ENDPOINT}/{repository}"
    match error:
        case HFValidationError():
            return CheckpointError(
                f"{repository!r} is not a repository name",
                hint="the form is owner/name, as in the URL of its page",
                tries=["titan download meta-llama/Llama-3.2-1B"],
            )
        case OfflineModeIsEnabled():
            return CheckpointError(
                f"{repository}: HF_HUB_OFFLINE is set, so nothing is downloaded",
                hint=f"earlier downloads are in {constants.HF_HUB_CACHE}; every command can read them there",
                tries=[f"HF_HUB_OFFLINE=0 titan download {repository}"],
            )
        case GatedRepoError():
            return CheckpointError(
                f"{repository}: access is granted by the owner, and "
                + ("the account of this token has none" if has_token else "no token was sent"),
                hint=f"log in at {page}, accept the terms and wait for the approval"
                + ("; a fine-grained token must also be allowed to read gated repositories" if has_token else ""),
                tries=() if has_token else _LOG_IN,
            )
        case DisabledRepoError():
            return CheckpointError(
                f"{repository}: the hub has disabled this repository", hint=f"its page gives the reason: {page}"
            )
        case RevisionNotFoundError():
            return CheckpointError(f"{repository}: no branch, tag or commit {revision!r}", hint=f"see {page}/tree/main")
        case RepositoryNotFoundError():
            return CheckpointError(
                f"{repository}: no such model on the hub"
                + (", or this token may not see it" if has_token else ", or it is private: no token was sent"),
                hint=f"check the name against the URL of its page: {page}",
                tries=() if has_token else _LOG_IN,
            )
        case HfHubHTTPError():
            return _of_status(error, repository)
        case LocalEntryNotFoundError():  # raised by the client when the hub stops responding
            return _of_connection(error.__cause__ or error)
        case EntryNotFoundError():
            return CheckpointError(
                f"{repository}: a listed file no longer exists",
                hint="the repository may have changed; run the command again",
            )
        case FileMetadataError():
            return CheckpointError(
                f"{constants.ENDPOINT}: the response is not that of a Hugging Face hub", hint="check HF_ENDPOINT"
            )
        case httpx2.ProxyError():
            return CheckpointError(
                f"{constants.ENDPOINT}: the proxy refused the connection ({error})",
                hint=f"check HTTPS_PROXY, then {RESUME}",
            )
        case ImportError() if "SOCKS" in str(error):
            return CheckpointError(
                f"{constants.ENDPOINT}: a SOCKS proxy needs the package socksio",
                hint="the proxy is set by ALL_PROXY or HTTPS_PROXY; an http:// proxy needs no package",
                tries=["pip install socksio"],
            )
        case httpx2.HTTPError():
            return _of_connection(error)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return CheckpointError(
                f"{error.filename or 'the disk'}: {error.strerror}", hint=f"free disk space, then {RESUME}"
            )
    return None  # an error of the machine, or a bug: the command line reports it


def _of_connection(error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{constants.ENDPOINT}: the connection failed ({str(error) or type(error).__name__})",
        hint=f"check the network and HTTPS_PROXY, then {RESUME}",
    )


def _of_status(error: HfHubHTTPError, repository: str) -> CheckpointError:
    status = error.response.status_code
    why = error.server_message or error.response.reason_phrase
    hints = {
        401: "the token is invalid or has expired; create one at https://huggingface.co/settings/tokens",
        403: "the token may not read this repository; see its permissions at https://huggingface.co/settings/tokens",
        429: "too many requests; wait some minutes. The limit is higher with a token",
    }
    hint = hints.get(status, f"the problem is on the hub's side; later, {RESUME}" if status >= 500 else "")
    return CheckpointError(f"{repository}: the hub responded with {status} ({why})", hint=hint)
