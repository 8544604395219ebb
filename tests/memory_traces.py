"""A trace made by hand that looks like a rank's: parameters, then steps of forward, backward and update, on streams."""

from titan_tools.memory.trace.events import COMPUTE, Block, StepPoint, Trace, TraceSegment

MIB = 1 << 20


class TraceMaker:
    """Writes a trace event by event."""

    def __init__(self):
        self.trace = Trace()
        self.point = StepPoint(0, "build")

    def at(self, *point) -> None:
        """What follows happens there; see Place."""
        self.point = StepPoint(*point)

    def allocate(self, num_bytes: int, part: str, *, stream: str = COMPUTE, owner: str = "") -> int:
        self.trace.blocks.append(Block(num_bytes, stream, part, self.point, owner))
        self._add(len(self.trace.blocks) - 1)
        return len(self.trace.blocks) - 1

    def free(self, *blocks: int) -> None:
        for block in blocks:
            self._add(~block)

    def _add(self, event: int) -> None:
        if not self.trace.segments or self.trace.segments[-1].point != self.point:
            self.trace.segments.append(TraceSegment(self.point))
        self.trace.segments[-1].events.append(event)


def make_step_trace(*, num_layers: int = 4, num_steps: int = 2, layer_mib: int = 24) -> Trace:
    """Sharded parameters and Adam's states; layers gathered on streams of their own; the optimizer made in step 1."""
    maker = TraceMaker()
    layer = layer_mib * MIB
    for number in range(num_layers):
        maker.allocate(layer // 8, "parameters", owner=f"layers.{number}.weight")
    for step in range(1, num_steps + 1):
        kept, gathered = [], None
        for number in range(num_layers):
            maker.at(step, "forward", 0, 0, f"layers.{number}")
            flat = maker.allocate(layer, "all_gather", stream="all_gather_copy_in")
            if gathered is not None:
                maker.free(gathered)
            gathered = flat
            kept.append([maker.allocate(size * MIB + 100, "activations") for size in (8, 8, 3)])
            maker.free(maker.allocate(layer, "all_gather"))
        maker.at(step, "forward", 0, 0, "output")
        maker.free(gathered)
        logits = maker.allocate(100 * MIB, "logits_and_loss")
        maker.at(step, "backward", 0, 0, "loss")
        maker.free(maker.allocate(100 * MIB, "logits_and_loss"), logits)
        gradients = []
        for number in reversed(range(num_layers)):
            maker.at(step, "backward", 0, 0, f"layers.{number}")
            maker.free(maker.allocate(30 * MIB, "recompute"))
            whole = maker.allocate(2 * layer, "reduce_scatter", stream="reduce_scatter")
            gradients.append(maker.allocate(layer // 8, "gradients", stream="reduce_scatter"))
            maker.free(whole, *kept.pop())
        maker.at(step, "optimizer")
        if step == 1:
            for number in range(num_layers):
                maker.allocate(layer // 4, "optimizer", owner=f"layers.{number}.weight")
        maker.at(step, "zero_grad")
        maker.free(*gradients)
    return maker.trace
