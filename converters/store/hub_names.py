"""Names of models on the Hugging Face hub in place of a folder: meta-llama/Llama-3.2-1B, or NAME@REVISION.

Nothing is downloaded: a name stands for its snapshot in the hub's cache (HF_HOME, HF_HUB_CACHE).
"""

import os
import re
from pathlib import Path

from converters.common.errors import CheckpointError
from converters.store.commit import find_complete
from converters.store.hub_checksums import default_cache
from converters.store.location import Location, Place, locate

_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")


def find_local(place: Place, *, assets: str = "") -> Location:
    """`place` or, if it names a model of the hub, its snapshot in the cache. What exists at `place` takes precedence.

    Raises CheckpointError for a model that the cache does not have; `assets`: the files of it that are needed, a value
    of `titan download --assets`. A path into an existing folder is returned as it is.
    """
    location = locate(place)
    named = _NAME.fullmatch(str(location))
    if named is None or os.path.lexists(location.path) or find_complete(location.path).exists():
        return location
    if (snapshot := _find_snapshot(named["repository"], named["revision"])) is not None:
        return locate(snapshot)
    if Path(named["repository"]).parent.exists():
        return location  # a typing error in a local path: its reader says what is there
    raise _not_cached(named["repository"], named["revision"], assets)


def download_command(path: Path | str, *, assets: str = "") -> list[str]:
    """The command that downloads the model that `path` names, as the `tries` of an error; empty for other paths."""
    if (named := _NAME.fullmatch(str(path))) is None:
        return []
    revision = f" --revision {named['revision']}" if named["revision"] else ""
    return [f"titan download {named['repository']}{revision}" + (f" --assets {assets}" if assets else "")]


def cached_names() -> list[str]:
    """The models in the hub's cache."""
    return sorted(
        path.name.removeprefix("models--").replace("--", "/", 1) for path in default_cache().glob("models--*--*")
    )


def _find_snapshot(repository: str, revision: str | None) -> Path | None:
    """The snapshot's folder, which may be incomplete: opening it says what is missing."""
    from huggingface_hub import snapshot_download  # here: it takes 0.4 s
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=[]))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _not_cached(repository: str, revision: str | None, assets: str) -> CheckpointError:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repository + (f"@{revision}" if revision else "")
    snapshots = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"), "snapshots")
    others = sorted(folder.name for folder in snapshots.glob("*") if folder.is_dir())
    return CheckpointError(
        f"{name}: no such file or folder, and the Hugging Face cache {constants.HF_HUB_CACHE} does not have "
        + (f"its revision {revision or 'main'}" if others else "this model"),
        hint=f"the cache has {len(others)} other revision{'s' if len(others) > 1 else ''} of it" if others else "",
        tries=[*download_command(name, assets=assets), *(f"{repository}@{commit}" for commit in others[:3])],
    )
