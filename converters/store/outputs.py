"""Who makes the outputs of a location: of a path, the folder's; of a URI, what is registered for its scheme."""

from converters.common.errors import CheckpointError, UnsupportedError
from converters.common.extensions import check_attributes, check_name, check_protocol
from converters.common.sizes import format_bytes
from converters.store.folder_output import FolderOutputs
from converters.store.location import SCHEME, Location
from converters.store.output import Claimed, Output, Outputs, RunOutputs

_OUTPUTS: dict[str, Outputs] = {}


def register_outputs(scheme: str, outputs: Outputs) -> None:
    """Write to locations `scheme://…` with the outputs that `outputs` makes (output.Outputs says what it needs).

    Runs save there, and `verify --accept` writes, if they are RunOutputs.
    """
    check_name("store", scheme, _OUTPUTS, pattern=SCHEME)
    what = f"what makes the outputs of {scheme}://"
    check_protocol(outputs, Outputs, what)
    if any(hasattr(outputs, name) for name in vars(RunOutputs) if not name.startswith("_")):
        check_protocol(outputs, RunOutputs, what)
    _OUTPUTS[scheme] = outputs


def require_space(location: Location, num_bytes: int) -> int:
    """The free bytes of a location. Raises CheckpointError if they are less than `num_bytes`, or it is not writable."""
    free_bytes = outputs_at(location).free_bytes(location)
    if free_bytes < num_bytes:
        raise CheckpointError(
            f"{location}: needs {format_bytes(num_bytes)}, {format_bytes(free_bytes)} are free on that disk",
            hint="nothing was written",
        )
    return free_bytes


def outputs_at(location: Location) -> Outputs:
    """What makes outputs at a location. Raises UnsupportedError if nothing is registered for the scheme of a URI."""
    if not location.scheme:
        return FolderOutputs()
    if location.scheme not in _OUTPUTS:
        known = ", ".join(f"{scheme}://" for scheme in sorted(_OUTPUTS))
        raise UnsupportedError(
            f"{location}: {location.scheme}:// cannot be written to", hint=f"known: paths{known and f', {known}'}"
        )
    return _OUTPUTS[location.scheme]


def run_outputs_at(location: Location) -> RunOutputs:
    """`outputs_at`, for a run. Raises UnsupportedError if only conversions can be written there."""
    outputs = outputs_at(location)
    if not isinstance(outputs, RunOutputs):
        raise UnsupportedError(
            f"{location}: only `convert`, `reshard` and `seed` can write to {location.scheme}://",
            hint="what is registered for it has none of the other methods of RunOutputs (converters.api)",
        )
    return outputs


def checked(output: Output, location: Location) -> Output:
    """The output. Raises ExtensionError if it lacks what is called of it, before anything is written."""
    if location.scheme:
        check_protocol(output, Output, f"the output of {location.scheme}://")
    return output


def checked_claim(claimed: Claimed, location: Location) -> Claimed:
    """What `Outputs.claim` gives, likewise."""
    if location.scheme:
        check_attributes(claimed, ("output", "journal", "remarks"), f"what claims {location.scheme}://")
        checked(claimed.output, location)
    return claimed
