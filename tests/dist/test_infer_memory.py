"""A rank of `titan infer` holds its shard, and beside it no more than its largest slice: peaks that the kernel tells.

Each rank is a fresh process that has imported everything and run a tiny model before: what it holds then is the
interpreter. Ranks load without speaking to each other, so the second of two is measured alone.
"""

import json
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import prod
from pathlib import Path

import pytest

from converters.catalog import TensorInfo
from converters.families.registry import get_family
from converters.layout import MIB
from converters.model_info import read_model_info, write_model_info
from scripts.bench.models import LLAMA_1B, write_model
from tests.big_shapes import write_sparse_dcp
from tests.tiny_llama import write_llama
from titan_tools.infer.model.slices import slice_for_rank

# 219 M parameters, 438 MB in bf16. As in any real model, half of the embedding is more than the blocks that are read.
CONFIG = {
    **LLAMA_1B,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 96000,
    "tie_word_embeddings": False,
}
SLACK = 32 * MIB  # malloc keeps of what was freed up to twice the largest piece below 32 MiB, however large the model


def tell(name: str) -> int:
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) * 1024


def load_and_tell(folder: Path, tiny: Path, dtype: str, tp: int, rank: int) -> dict[str, int]:
    """Bytes of this rank's slices, of the largest of them, and the peak of what loading took."""
    import torch

    from tests.tiny_infer import complete, load

    torch.set_num_threads(1)
    complete(load(tiny, dtype=getattr(torch, dtype)), [[1, 2, 3]], max_new_tokens=2)
    before = tell("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    model = load(folder, dtype=getattr(torch, dtype), tp=tp, rank=rank)
    peak = tell("VmHWM") - before
    info = read_model_info(folder)
    boxes = [slice_for_rank(p, info.args, tp=tp, rank=rank) for p in get_family(info.family).parameters(info.args)]
    sizes = [box.num_elements * model.dtype.itemsize for box in boxes]
    return {"shard": sum(sizes), "largest": max(sizes), "peak": peak, "after": tell("VmRSS") - before}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """tiny/, and the big one as hf/ and dcp/: sparse files of zeros."""
    root = tmp_path_factory.mktemp("big")
    write_llama(root / "tiny")
    write_model(root / "hf", CONFIG, sparse=True)
    write_model(root / "hf, tied", CONFIG | {"tie_word_embeddings": True}, sparse=True)
    info = read_model_info(root / "hf")
    parameters = get_family(info.family).parameters(info.args)
    write_sparse_dcp(root / "dcp", {p.fqn: TensorInfo("bfloat16", p.shape) for p in parameters}, num_files=2)
    write_model_info(root / "dcp", info)
    assert sum(prod(p.shape) for p in parameters) > 200e6
    return root


QUICK = (("hf", "bfloat16", 2), ("dcp", "float32", 1))
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in product(("hf", "hf, tied", "dcp"), ("bfloat16", "float32"), (1, 2))
]


@pytest.mark.parametrize(("form", "dtype", "tp"), CASES)
def test_a_rank_holds_its_shard_and_its_largest_slice(folders, form, dtype, tp):
    forks = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=forks) as fresh:
        told = fresh.submit(load_and_tell, folders / form, folders / "tiny", dtype, tp, tp - 1).result(120)
    print(json.dumps({name: round(value / MIB, 1) for name, value in told.items()}))
    assert told["peak"] <= told["shard"] + told["largest"] + SLACK
    assert told["peak"] > told["shard"] > 200 * MIB / tp
