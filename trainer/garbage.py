"""Python's garbage collector on all ranks at the same steps: else each stops when it likes, and every time all wait."""

import gc

from trainer.observability.log import note


class GarbageCollection:
    """Around the loop; `collect` after every step does its work every `freq` steps, or, to debug, after each."""

    def __init__(self, freq: int, *, debug: bool):
        self._freq, self._debug = freq, debug

    def __enter__(self) -> "GarbageCollection":
        gc.collect()
        gc.disable()
        return self

    def __exit__(self, *exc_info: object) -> None:
        gc.enable()

    def collect(self, step: int) -> None:
        """Under `debug` it says what was found: reference cycles, which would keep activations alive for long."""
        if not self._debug and step % self._freq:
            return
        num_found = gc.collect()
        if self._debug:
            note(f"step {step}: {num_found} objects that only the garbage collector could free")
