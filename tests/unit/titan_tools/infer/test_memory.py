"""Memory of inference: no more sequences at a time than a GPU has memory for, and one error where it runs out."""

import errno
import json
import mmap
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from converters.common.errors import ConfigError
from converters.source.weights import open_native
from tests.chat_templates import CHATML
from tests.models.dense import write as write_tiny
from tests.models.llama import write as write_llama
from tests.models.qwen3_moe import write as write_experts
from tests.tiny_infer import CPU, NO_TEXT, load
from titan_tools.cli import app
from titan_tools.infer import loading as loading_file
from titan_tools.infer import memory
from titan_tools.infer import run as infer_run
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.memory import GIB, rows_that_fit
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.request import Request
from titan_tools.infer.task import Work
from trainer.ranks import machine

pytestmark = pytest.mark.usefixtures("one_thread")
ROOM = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, chat_template=CHATML)
    return folder


@pytest.fixture
def gpu_of(monkeypatch):
    """Let every device be a GPU that has so much memory left."""
    return lambda num_bytes: monkeypatch.setattr(memory, "free_bytes", lambda device: num_bytes)


def needed(model, args, rows):
    """Bytes that `rows` sequences take, without the rest."""
    return rows * (model.cache_bytes(ROOM) + args.vocab_size * memory._BYTES_PER_LOGIT)


def test_the_caches_bytes_are_those_that_it_has(hf):
    model = load(hf, dtype=torch.bfloat16)
    engine = Engine(model, rows=3, room=ROOM)
    num_bytes = sum(t.nbytes for layer in engine._cache.layers for t in layer.tensors)
    assert num_bytes == 3 * model.cache_bytes(ROOM)


@pytest.mark.parametrize(("room_for", "rows"), [(100, 8), (8, 8), (7.9, 7), (1, 1), (0.5, 1), (-50, 1)])
def test_rows_are_those_that_free_memory_holds(hf, gpu_of, capsys, room_for, rows):
    with open_native(hf) as weights:
        args = weights.info.args
    model, ranks = load(hf), TPRanks(1, 0, CPU)
    others = 2048 * (8 * args.dim + 4 * args.ffn_hidden) * 4 + memory._OTHER_BYTES
    gpu_of(others + int(needed(model, args, room_for)))
    assert rows_that_fit(model, args, ranks, rows=8, room=ROOM) == rows
    output = capsys.readouterr().err
    assert output.startswith(f"{rows} sequence{'s' * (rows != 1)} at a time instead of 8: each needs ") == (rows < 8)
    assert (output == "") == (rows == 8)


def test_heads_that_a_prefill_copies_need_room_too(hf, gpu_of, monkeypatch):
    """Here as much as a row: one layer's for 4 heads, and a row holds 2 layers' for 2."""
    with open_native(hf) as weights:
        args = weights.info.args
    model, ranks, long = load(hf), TPRanks(1, 0, CPU), 100_000
    gpu_of(memory._OTHER_BYTES + (1 << 28))
    as_they_are = rows_that_fit(model, args, ranks, rows=99, room=long)
    monkeypatch.setattr(memory, "copies_heads", lambda device_type, dtype: True)
    assert rows_that_fit(model, args, ranks, rows=99, room=long) == as_they_are - 1 < 98


def test_each_of_a_tokens_experts_needs_room(tmp_path, gpu_of):
    write_experts(tmp_path)
    with open_native(tmp_path) as weights:
        args = weights.info.args
    model, ranks = load(tmp_path), TPRanks(1, 0, CPU)
    inside = 3 * (7 * 32 + 4 * 24)  # 3 experts a token, of width 24 on 32
    for more in (0, -1):
        gpu_of(memory._OTHER_BYTES + 2048 * (8 * 32 + inside) * 4 + int(needed(model, args, 5)) + more)
        assert rows_that_fit(model, args, ranks, rows=8, room=ROOM) == 5 + more


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_with_the_least_memory_counts(hf, gpu_of, monkeypatch, capsys, rank):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda number, op: number.clamp_(min=-3))  # of -rows
    gpu_of(1 << 40)
    with open_native(hf) as weights:
        assert rows_that_fit(load(hf), weights.info.args, TPRanks(2, rank, CPU), rows=8, room=ROOM) == 3
    assert ("3 sequences at a time" in capsys.readouterr().err) == (rank == 0)


def test_fewer_rows_say_the_same(titan, hf, gpu_of, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": "ab" * n}) + "\n" for n in range(1, 6)))
    asked = ("infer", hf, "--batch", tmp_path / "in.jsonl", "--max-new-tokens", "9")
    used, made = [], Engine.__init__
    monkeypatch.setattr(
        Engine, "__init__", lambda self, *args, rows, **more: used.append(rows) or made(self, *args, rows=rows, **more)
    )
    _, expected, _ = titan(*asked)
    gpu_of(0)
    code, out, err = titan(*asked)
    assert code == 0 and out == expected and "1 sequence at a time instead of 5" in err and used == [5, 1]


def ask_too_much_of_torch():
    torch.empty(1 << 50, dtype=torch.uint8)


def ask_too_much_of_the_system():
    mmap.mmap(-1, 1 << 50)


def ask_too_much_of_python():
    bytearray(1 << 60)


def ask_too_much_of_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79 GiB\nmore of it")


def ask_too_much_of_cublas():
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


TOO_MUCH = {
    ask_too_much_of_torch: f"an allocation of {(1 << 50) / GIB:.2f} GiB was refused: a limit of this machine, "
    "container or shell",
    ask_too_much_of_the_system: "a limit of this machine, container or shell",
    ask_too_much_of_python: "a limit of this machine, container or shell",
    ask_too_much_of_a_gpu: "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79 GiB",
    ask_too_much_of_cublas: "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
}


@pytest.mark.parametrize("ask", TOO_MUCH, ids=lambda ask: ask.__name__.rpartition("_")[2])
@pytest.mark.parametrize("loading", [True, False], ids=["loading", "running"])
def test_memory_that_runs_out_is_one_error(titan, hf, monkeypatch, ask, loading):
    monkeypatch.setattr(*((loading_file, "load_model") if loading else (infer_run, "Engine")), lambda *_, **__: ask())
    asked = ("--prompt", "a", "--samples", "4", "--temperature", "1", "--max-new-tokens", "100")
    code, out, err = titan("infer", hf, *asked)
    assert code == 2 and out == "" and f"\nhint: {TOO_MUCH[ask]}\n" in err and "fault of titan" not in err
    if loading:
        assert err.startswith("error: out of memory while reading the weights, about 0.00 GiB per rank in float32\n")
        assert err.endswith("\ntry: --quantize int8\ntry: --dtype bfloat16\n")
    else:
        assert err.startswith(
            "error: out of memory: the cache of 4 sequences of 102 tokens takes 0.00 GiB per rank "
            "in addition to the weights\n"
        )
        assert "\ntry: --batch-size 2\ntry: --max-new-tokens 50\ntry: --quantize int8\n" in err


@pytest.mark.parametrize("error", [RuntimeError("another"), OSError(errno.EIO, "Input/output error"), ValueError("x")])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as caught, memory._explained("", []):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("asked", "tried"),
    [
        (("--prompt", "a"), ["--quantize", "--dtype"]),
        (("--chat", "--context", "200"), ["--context 100", "--quantize", "--dtype"]),
        (("--chat", "--prompt", "a", "--quantize", "int8"), []),
        (("--score", "--prompt", "a" * 41, "--dtype", "bfloat16"), ["--context 20", "--quantize"]),
    ],
)
def test_what_is_to_try_is_an_option_that_does_something_there(titan, folder, monkeypatch, asked, tried):
    monkeypatch.setattr(infer_run, "Engine", lambda *_, **__: ask_too_much_of_torch())
    code, _, err = titan("infer", folder, *asked)
    tries = re.findall("^try: (.*)$", err, re.MULTILINE)
    assert code == 2 and len(tries) == len(tried) and all(a.startswith(b) for a, b in zip(tries, tried, strict=True))
    known = {name for option in typer.main.get_command(app).commands["infer"].params for name in option.opts}
    assert {option.split()[0] for option in tries} <= known


@pytest.mark.parametrize(("num_gpus", "tried"), [(0, []), (1, []), (2, ["--tp 2"])])
def test_more_ranks_are_to_try_where_there_are_gpus_for_them(hf, monkeypatch, num_gpus, tried):
    with open_native(hf) as weights:
        work = Work(Request(hf, Sampling()), weights.info.args, NO_TEXT, None, 1, "bfloat16", hf)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert [*memory._weight_tries(work)] == [*tried, "--quantize int8"]


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("write", "options"),
    [
        (partial(write_tiny, name="llama3"), {}),
        (partial(write_tiny, name="llama3_tied"), {"quantize": "int8"}),
        (partial(write_tiny, name="qwen3"), {"quantize": "float8", "dtype": "bfloat16"}),
        (partial(write_tiny, name="llama3_tied"), {"dtype": "bfloat16"}),
    ],
    ids=["fp32", "tied, int8", "float8", "tied, bf16"],
)
def test_the_bound_is_what_the_weights_take(tmp_path, write, options, tp):
    write(tmp_path, numbers=WIDE)
    dtype = options.get("dtype", "float32")
    with open_native(tmp_path) as weights:
        request = Request(tmp_path, Sampling(), quantize=options.get("quantize"))
        work = Work(request, weights.info.args, None, None, tp, dtype, tmp_path)
        bound = [memory.weight_bytes(work, weights, rank) for rank in range(tp)]
        cache = memory.cache_bytes(work, weights.info, ROOM)
    for rank in range(tp):
        model = load(
            tmp_path, dtype=getattr(torch, dtype), tp=tp, rank=rank, quantize=options.get("quantize"), packed=False
        )
        rotary = [t for name, t in model.body.named_buffers() if "freqs" in name or "rope" in name or "table" in name]
        held = {id(t): t.nbytes for part in (model.body, model.head) for t in (*part.parameters(), *part.buffers())}
        num_bytes = sum(held.values()) - sum(t.nbytes for t in rotary)
        assert 0.95 * num_bytes <= bound[rank] <= num_bytes
        assert cache == model.cache_bytes(ROOM)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """This machine has 40 KiB available."""
    (tmp_path / "meminfo").write_text("MemAvailable: 40 kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "none")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_that_cannot_fit_is_refused_before_it_is_read(small, folder, monkeypatch, tp):
    monkeypatch.setattr(infer_run, "load_weights", lambda *args, **keys: pytest.fail("weights were read"))
    monkeypatch.setattr(infer_run, "run_ranks", lambda argv, **keys: 7)
    command = ["infer", str(folder), "--prompt", "def", "--tp", str(tp)]
    error = CliRunner().invoke(app, command).exception
    assert error.exit_code == 2 and error.message.endswith("of memory on this machine: 40.0 KiB available")
    assert "the model needs at least" in error.message and error.tries[-1] == "--ignore-memory, to start nevertheless"
    if tp == 2:
        assert CliRunner().invoke(app, [*command, "--ignore-memory"]).exit_code == 7


def test_a_gpu_holds_its_weights_and_one_sequence(folder, gpu_of):
    with open_native(folder) as weights:
        work = Work(Request(folder, Sampling()), weights.info.args, None, None, 1, "float32", folder)
        task, ranks = SimpleNamespace(room=ROOM), TPRanks(1, 0, CPU)
        least = memory.weight_bytes(work, weights, 0) + memory.cache_bytes(work, weights.info, ROOM)
        gpu_of(least)
        memory.require_on_gpu(work, weights, task, ranks)
        gpu_of(least - 1)
        with pytest.raises(ConfigError, match="on the GPU of rank 0"):
            memory.require_on_gpu(work, weights, task, ranks)
