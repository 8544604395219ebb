"""As many sequences as a GPU's free memory is said to hold do fit, and more than it holds is one error."""

import pytest
import torch

from converters.source.weights import open_native
from tests.models.llama import write as write_llama
from tests.tiny_infer import NO_TEXT, load
from titan_tools.infer import memory as free_memory
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.memory import OutOfMemory, free_bytes, memory_for_sequences, rows_that_fit
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.request import Request
from titan_tools.infer.task import Work

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda", 0)
ROOM = 1 << 20  # 1 GiB a row in 16 bits: 2 layers, keys and values, 2 heads of 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rows_that_are_said_to_fit_do(folder, dtype):
    model, ranks = load(folder, dtype=dtype, device=GPU), TPRanks(1, 0, GPU)
    with open_native(folder) as weights:
        args = weights.info.args
    a_row = model.cache_bytes(ROOM)
    others = free_memory._OTHER_BYTES + free_memory._pass_bytes(model, args, tp=1, room=ROOM)
    filler = torch.empty(free_bytes(GPU) - others - int(3.5 * a_row), dtype=torch.uint8, device=GPU)
    rows = rows_that_fit(model, args, ranks, rows=8, room=ROOM)
    assert rows == 3
    engine = Engine(model, rows=rows, room=ROOM)
    for row in range(rows):
        engine.prefill(row, [1, 2, 3] * 1000)
    assert engine.decode([1] * rows).isfinite().all()
    del filler


def test_more_than_there_is_is_reported(folder):
    with open_native(folder) as weights:
        work = Work(Request(folder, Sampling()), weights.info.args, NO_TEXT, None, 1, "bfloat16", folder)
    model, rows = load(folder, dtype=torch.bfloat16, device=GPU), 100_000
    said = "the cache of 100,000 sequences of 1,048,576 tokens takes"
    with pytest.raises(OutOfMemory, match=said) as caught, memory_for_sequences(work, model, rows=rows, room=ROOM):
        Engine(model, rows=rows, room=ROOM)
    assert "CUDA out of memory" in caught.value.hint and "--batch-size 50000" in caught.value.tries
