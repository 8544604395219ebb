"""A rank of `titan infer` holds its shard, and next to it no more than its largest slice: peaks that the kernel tells.

Each rank is a fresh process that has imported everything and run a tiny model before: what it holds then is the
interpreter. Ranks load without speaking to each other, so the last of them is measured alone; of the command all are.
"""

import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from itertools import product
from math import prod
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from converters.common.box import TensorInfo
from converters.common.dtypes import itemsize
from converters.families.registry import get_family
from converters.layout.layout import MIB
from converters.model.model_info import read_model_info, write_model_info
from converters.source.open import open_checkpoint
from converters.store.folder_output import FolderOutput
from converters.store.manifest import TensorSum
from converters.store.output import write_manifest
from scripts.bench.models import LLAMA_1B, QWEN3_1B, QWEN3_MOE, write_model
from tests.big_shapes import write_sparse_dcp
from tests.models.llama import write as write_llama
from tests.models.llama import write_tokenizer
from titan_tools.infer.model.tensor_parallel import slice_for_rank

# 219 M parameters, 438 MB in bf16, a third of them in the largest
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
# 596 M parameters, of whose eighth (142 MiB in bf16) the largest slice is 37 MiB: what is read ahead of its use, and
# many small pieces that come and go, would show next to it
QWEN3_0_6B = {**QWEN3_1B, "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072}
# Here w1 and w3, which are one product elsewhere, would together be twice the largest
WIDE = {**CONFIG, "vocab_size": 8000, "intermediate_size": 32768}
# 166 M parameters, 91 % of them in 2 × 48 experts; all experts' gates of a layer are 48 MiB in bf16, the largest other
# weight is 16
EXPERTS = {
    **QWEN3_MOE,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "num_experts": 48,
    "moe_intermediate_size": 512,
}
# However large the model: two readers have a block of 2 MiB and up to 8 MiB of the file around it each, malloc keeps
# some of what they freed, and 28 layers are 4 MiB of Python's objects
SLACK = 32 * MIB
# Of the command, too: the cache of its few tokens, their activations, and memory that ranks share
COMMAND_SLACK = SLACK + 24 * MIB
ASK = ("--prompt", "def main(", "--max-new-tokens", "4", "--dtype", "bfloat16", "--json")


def bytes_told(name: str) -> int:
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) * 1024


def load_and_tell(folder: Path, tiny: Path, dtype: str, tp: int, rank: int) -> dict[str, int]:
    """Bytes of this rank's slices, of the largest of them, and the peak of what loading took."""
    import torch

    from tests.tiny_infer import complete, load

    torch.set_num_threads(1)
    complete(load(tiny, dtype=getattr(torch, dtype)), [[1, 2, 3]], max_new_tokens=2)
    before = bytes_told("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    model = load(folder, dtype=getattr(torch, dtype), tp=tp, rank=rank)
    assert model.dtype.itemsize == itemsize(dtype)
    peak = bytes_told("VmHWM") - before
    return {"peak": peak, "after": bytes_told("VmRSS") - before, **bytes_of_slices(folder, dtype, tp, rank)}


def bytes_of_slices(folder: Path, dtype: str, tp: int, rank: int) -> dict[str, int]:
    """Of a rank's, all and the largest."""
    info, size = read_model_info(folder), itemsize(dtype)
    boxes = [slice_for_rank(p, info.args, tp=tp, rank=rank) for p in get_family(info.family).parameters(info.args)]
    sizes = [box.num_elements * size for box in boxes]
    # Experts are read one by one, gates together with what they multiply
    at_once = [2 * num // box.sizes[0] if len(box.sizes) == 3 else num for num, box in zip(sizes, boxes, strict=True)]
    return {"shard": sum(sizes), "largest": max(at_once)}


def command_and_tell(folder: Path, tiny: Path, tp: int, rank: int, ports: tuple[int, int]) -> int:
    """The peak of a rank of `titan infer`, as an agent starts it, above that of one with a tiny model."""
    import torch

    from titan_tools import cli

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tp), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(tp)}
    os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    peaks = []
    for place, port in zip((tiny, folder), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = ["titan", "infer", str(place), *ASK]
        Path("/proc/self/clear_refs").write_text("5")
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as errors:
            assert cli.run() == 0, errors.getvalue()
        peaks.append(bytes_told("VmHWM"))
    return peaks[1] - peaks[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """tiny/, and large ones of either container: sparse files of zeros."""
    root = tmp_path_factory.mktemp("big")
    write_llama(root / "tiny", num_attention_heads=8, num_key_value_heads=8)
    for name, config in {"hf": CONFIG, "many small": QWEN3_0_6B}.items():
        write_model(root / name, config, sparse=True)
        turned = config | {"tie_word_embeddings": not config["tie_word_embeddings"]}
        write_model(root / f"{name}, tie turned", turned, sparse=True)
        write_tokenizer(root / name)
    write_model(root / "wide", WIDE, sparse=True)
    write_model(root / "experts", EXPERTS, sparse=True)
    info = read_model_info(root / "hf")
    parameters = get_family(info.family).parameters(info.args)
    write_sparse_dcp(root / "dcp", {p.fqn: TensorInfo("bfloat16", p.shape) for p in parameters}, num_files=2)
    write_model_info(root / "dcp", info)
    assert sum(prod(p.shape) for p in parameters) > 200e6
    return root


def in_fresh_processes(work, arguments):
    """What `work` returns in a process of its own for each of `arguments`, all at once."""
    forks = multiprocessing.get_context("forkserver")
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, mp_context=forks)) for _ in arguments]
        futures = [pool.submit(work, *given) for pool, given in zip(pools, arguments, strict=True)]
        return [future.result(120) for future in futures]


def is_bounded(output, slack, tell, what):
    mib = {name: f"{value / MIB:.0f}" for name, value in output.items()}
    tell(f"memory, {what}: {mib['peak']} MiB at most, the shard is {mib['shard']}, the largest slice {mib['largest']}")
    return output["shard"] < output["peak"] <= output["shard"] + output["largest"] + slack


QUICK = (("hf", "bfloat16", 2), ("many small", "bfloat16", 8), ("experts", "bfloat16", 2))
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in (
        *product(("hf", "hf, tie turned", "dcp"), ("bfloat16", "float32"), (1, 2)),
        *product(("many small", "many small, tie turned"), ("bfloat16", "float32"), (1, 8)),
        ("wide", "bfloat16", 1),
        *product(("experts",), ("bfloat16", "float32"), (1, 2)),
    )
]


@pytest.mark.parametrize(("form", "dtype", "tp"), CASES)
def test_a_rank_holds_its_shard_and_its_largest_slice(folders, form, dtype, tp, tell):
    rank = tp - 1
    (output,) = in_fresh_processes(load_and_tell, [(folders / form, folders / "tiny", dtype, tp, rank)])
    assert is_bounded(output, SLACK, tell, f"{form}, {dtype}, tp {tp}")


@pytest.mark.parametrize(
    ("form", "tp"),
    [("hf", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("hf", 1), ("many small", 8)))],
)
def test_a_rank_of_the_command_holds_no_more(folders, form, tp, tell):
    """From its first line to its last token. The first reads every file for damage before that."""
    folder = folders / form
    sums = {name: TensorSum(t.dtype, t.shape, "") for name, t in open_checkpoint(folder).tensors.items()}
    write_manifest(FolderOutput(folder), tensors=sums)
    stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    ports = tuple(store.port for store in stores)
    peaks = in_fresh_processes(command_and_tell, [(folder, folders / "tiny", tp, rank, ports) for rank in range(tp)])
    for rank, peak in enumerate(peaks):
        output = {"peak": peak, **bytes_of_slices(folder, "bfloat16", tp, rank)}
        assert is_bounded(output, COMMAND_SLACK, tell, f"titan infer {form}, rank {rank} of {tp}")
