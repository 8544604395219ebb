"""The vocabulary of tensor-parallel plans. `trainer/parallel/tensor.py` says what each means in DTensor terms."""

from enum import Enum


class TensorStyle(Enum):
    """How a module works under tensor parallelism with sequence parallelism."""

    EMBEDDING = "rows of the vocabulary here; output becomes sequence shards"
    SEQUENCE_SHARDS = "weights replicated, works on sequence shards (norms)"
    HEADS = "weights replicated, works on the heads here: [B, L, heads, H]"
    GATHER_SEQUENCE = "input sequence shards are gathered for the module"
    COLUMNS = "output features here"
    ROWS = "input features here; partial sums become sequence shards"
    LOGITS = "gathers its input; columns of the vocabulary here"
