"""Draw initial weights with one thread and with all cores, in alternation: seconds, and whether the bits are equal.

python scripts/bench/initial_weights.py
"""

import argparse
import os
import time

import numpy as np

from converters.common.box import Box
from converters.common.threads import in_parallel
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo
from trainer.models.initial_weights import InitialWeights

LEAST_PER_THREAD = 0.85  # of the speed of one thread: 1.7 times on two


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="1B", help="of llama3; its embedding and first layers are drawn")
    parser.add_argument("--tensors", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    family, cores = get_family("llama3"), len(os.sched_getaffinity(0))
    args = family.flavors[chosen.flavor]
    weights = InitialWeights(ModelInfo("llama3", args), seed=1)
    parameters = family.parameters(args)[: chosen.tensors]

    def draw(threads: int) -> tuple[float, list[np.ndarray]]:
        drawn = [np.empty(p.shape, np.float32) for p in parameters]
        started = time.perf_counter()
        whole = [Box.whole(p.shape) for p in parameters]
        parts = (
            (values[part.slices_within(box)], draw_part)
            for p, box, values in zip(parameters, whole, drawn, strict=True)
            for part, draw_part in weights.blocks(p.fqn, box)
        )
        for place, values in in_parallel(lambda part: (part[0], part[1]()), parts, threads):
            place[...] = values
        return time.perf_counter() - started, drawn

    times: dict[int, list[float]] = {1: [], cores: []}
    same = True
    for number in range(chosen.rounds):
        results = {threads: draw(threads) for threads in times}
        for threads, (secs, _) in results.items():
            times[threads].append(secs)
            print(f"round {number + 1}: {threads} thread{'s' if threads > 1 else ''}, {secs:.2f} s", flush=True)
        same &= all(map(np.array_equal, results[1][1], results[cores][1]))
    ratio, least = min(times[1]) / min(times[cores]), LEAST_PER_THREAD * cores
    count = sum(box.num_elements for box in (Box.whole(p.shape) for p in parameters))
    print(f"{count / 1e6:,.0f} M values: {ratio:.2f} × on {cores} threads (at least {least:.2f}); same bits: {same}")
    raise SystemExit(0 if same and ratio >= least else 1)


if __name__ == "__main__":
    main()
