"""Measure attention within documents on a CPU, forward and backward, and the packing of documents.

python scripts/bench/documents.py

Attention of one sample of 2048 tokens, 8 heads of 64, in fp32 on one thread: documents one by one, as trained; an
additive mask; and causal without documents. Packing: a million documents in samples of 8192. Each line is a median.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data.packing import BestFit
from trainer.parallel.document_attention import PerDocumentAttention

LENGTH, HEADS, HEAD_DIM, REPEATS = 2048, 8, 64, 5


def main() -> None:
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, LENGTH, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    for num_documents in (1, 2, 8, 32):
        documents = (torch.arange(LENGTH) * num_documents // LENGTH)[None].to(torch.int32)
        sees = (documents[:, :, None] == documents[:, None]).tril()[:, None]
        bias = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))
        variants: dict[str, Callable[[], Tensor]] = {
            "one by one": partial(PerDocumentAttention(), q, k, v, documents),
            "additive mask": partial(attend, q, k, v, attn_mask=bias),
            "causal": partial(attend, q, k, v, is_causal=True),
        }
        found = {name: round(1e3 * secs_of(forward_and_backward(run)), 1) for name, run in variants.items()}
        print(json.dumps({"documents": num_documents, "ms": found}), flush=True)
    lengths = np.random.default_rng(0).lognormal(6, 1.3, 1_000_000).astype(np.int64) + 2
    offsets = np.concatenate(([0], lengths.cumsum()))
    packs = BestFit(offsets, 8192)
    print(
        json.dumps(
            {
                "packing, s": round(secs_of(partial(BestFit, offsets, 8192)), 2),
                "padding, %": round(100 * (1 - (lengths - 1).sum() / (len(packs) * 8192)), 5),
            }
        )
    )


def attend(q: Tensor, k: Tensor, v: Tensor, **mask: object) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **mask).transpose(1, 2)


def forward_and_backward(forward: Callable[[], Tensor]) -> Callable[[], None]:
    return lambda: forward().sum().backward()


def secs_of(run: Callable[[], object]) -> float:
    secs = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        secs.append(time.perf_counter() - started)
    return median(secs)


if __name__ == "__main__":
    main()
