"""A view of a checkpoint under other names: a TensorSource, and the ledger that assigned every tensor.

Nothing is copied. Each tensor of a view is an expression over tensors of its source, which is read box by box.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from converters.common.box import Box, TensorInfo, TensorSource
from converters.common.errors import CheckpointError
from converters.views.casts import count_non_finite
from converters.views.expressions import Expression, Rows

TIED_REASON = "tied: equal to the embedding, bit for bit"
REPEATED_REASON = "a copy of "  # + the name of the first
NOT_SAVED_REASON = "a buffer that training changes; this checkpoint has it in no layer"


@dataclass(slots=True)
class Ledger:
    """The sources of every target tensor, and why a source tensor is not used."""

    used: dict[str, tuple[str, ...]] = field(default_factory=dict)  # target name → source names
    dropped: dict[str, str] = field(default_factory=dict)  # source name → reason
    missing: list[str] = field(default_factory=list)  # if that is allowed: under the source's naming
    extra: list[str] = field(default_factory=list)  # unknown, if that is allowed
    made: dict[str, str] = field(default_factory=dict)  # target that is zeros, without a source → reason
    scales: set[str] = field(default_factory=set)  # of the names in `used`: those of scales, not of values
    repeated: dict[str, str] = field(default_factory=dict)  # dropped source name → the target that it is a copy of


@dataclass(frozen=True, slots=True)
class View:
    """A TensorSource under other names. `ledger` records the assignment of names.

    `finite`: the tensors whose values are used at once, so that `read` raises CheckpointError if one is NaN or
    infinite; who copies values counts them instead.
    """

    source: TensorSource
    tensors: Mapping[str, TensorInfo]
    expressions: Mapping[str, Expression]  # by name; over `source`
    ledger: Ledger
    finite: frozenset[str] = frozenset()

    def read(self, fqn: str, box: Box) -> np.ndarray:
        """The values of a box in the tensor's own dtype."""
        values = self.expressions[fqn].read(self.source, box)
        if fqn in self.finite:
            require_finite(fqn, values)
        return values

    def native_rows(self, fqn: str, rows: Rows) -> Rows:
        """The native numbers of a foreign view's rows, so that a digest does not depend on the naming."""
        expression = self.expressions.get(fqn)
        return rows if expression is None else expression.source_rows(rows)


def require_finite(name: str, values: np.ndarray) -> None:
    """Raise CheckpointError if codes, scales, or the values that were made of them are NaN or infinite."""
    if num := count_non_finite(values, values.dtype.name):
        raise CheckpointError(
            f"{name} is quantized, and {num:,} of the {values.size:,} numbers that were read are NaN or infinite",
            hint="codes or scales are damaged; `titan convert` lists all such weights and writes nothing",
        )
