"""The numbers of `titan infer --json` mean what their names say, and every JSON reader takes them."""

import inspect
import json
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.llama import BOS
from tests.models.llama import write as write_llama
from tests.tiny_infer import CPU, NO_TEXT, load
from titan_tools.infer import report
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Completion, GenerationSettings, Timings, generate
from titan_tools.infer.decoding.sampling import Sampling, TokenLogprobs
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.report import describe, peak_gb_per_sec, result_of, stats_of
from titan_tools.infer.request import Request
from titan_tools.infer.task import Work
from titan_tools.infer.text.prompts import Prompt
from titan_tools.terminal.console import print_json

pytestmark = pytest.mark.usefixtures("one_thread")
KEYS_AND_VALUES = 2 * 2 * 2 * 8 * 4  # bytes of a token: two layers, keys and values, two heads of 8 floats
KEYS = [
    "ttft_ms",
    "tpot_ms",
    "tokens_per_sec",
    "bandwidth_gb_per_sec",
    "bandwidth_share",
    "peak_memory_gib",
    "tp",
    "dtype",
    "seed",
    "quantize",
]
ALONE = TPRanks(1, 0, CPU)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, tie_word_embeddings=request.param)
    return load(folder)


def work(**asked):
    request = Request(Path("model"), Sampling(seed=9), **asked)
    return Work(request, None, NO_TEXT, None, 1, "float32", request.checkpoint)


def test_a_result_has_the_fields_of_the_help_in_their_order():
    output = [TokenLogprobs(5, -0.5, [(5, -0.5), (7, -1.5)])]
    completion = Completion(Prompt(3, "hi", [1, 2]), 1, [5], "there", "length", output)
    (one,) = result_of(completion)["logprobs"]
    assert list(result_of(completion)) == [
        "id",
        "prompt",
        "text",
        "prompt_tokens",
        "tokens",
        "finish_reason",
        "logprobs",
    ]
    assert one == {"token": 5, "logprob": -0.5, "top": [(5, -0.5), (7, -1.5)]}
    sampled = result_of(completion, samples=2)
    assert list(sampled)[:3] == ["id", "sample", "prompt"] and (sampled["id"], sampled["sample"]) == (3, 1)


def test_times_and_bytes_are_those_of_the_run(model):
    timings = Timings(
        first_token_secs=[0.1, 0.3],
        decode_secs=2.0,
        num_decode_steps=10,
        num_tokens=22,
        cache_bytes_read=300 * KEYS_AND_VALUES,
    )
    engine = Engine(model, rows=2, room=32)
    stats = stats_of(timings, engine, ALONE, work(), secs=4.0)
    assert list(stats) == KEYS
    assert stats["ttft_ms"] == pytest.approx(200) and stats["tpot_ms"] == pytest.approx(200)
    assert stats["tokens_per_sec"] == 22 / 4
    weights = {w.data_ptr(): w.numel() * 4 for w in (*model.body.parameters(), *model.head.parameters())}
    embedding = model.body.tok_embeddings.weight
    if embedding.data_ptr() != model.head.weight.data_ptr():
        del weights[embedding.data_ptr()]  # of which a step reads a row for each sequence
    read = 10 * sum(weights.values()) + 300 * KEYS_AND_VALUES
    assert stats["bandwidth_gb_per_sec"] == pytest.approx(read / 2.0 / 1e9)
    assert stats["bandwidth_share"] is None
    assert (stats["tp"], stats["dtype"], stats["seed"]) == (1, "float32", 9)
    assert stats_of(timings, engine, ALONE, work(quantize="int8"), secs=4.0)["dtype"] == "int8"


def test_a_run_of_ragged_rows_counts_each_token_and_each_key_once(model):
    prompts = [Prompt(i, "", [BOS] * (3 + i)) for i in range(3)]
    timings, engine = Timings(), Engine(model, rows=2, room=16)
    list(generate(engine, prompts, GenerationSettings(max_new_tokens=5), NO_TEXT, timings=timings))
    assert timings.num_tokens == 15 and len(timings.first_token_secs) == 3
    # the first two decode together, then the third alone; a step reads the keys of its own token too
    assert timings.num_decode_steps == 4 + 4
    num_read = sum(n + step for n in (3, 4, 5) for step in (1, 2, 3, 4))
    assert timings.cache_bytes_read == num_read * KEYS_AND_VALUES


def test_without_a_decode_step_its_numbers_are_none_and_the_line_leaves_them_out(model):
    stats = stats_of(Timings([0.5], num_tokens=1), Engine(model, rows=1, room=4), ALONE, work(), secs=0.5)
    assert stats["tpot_ms"] is stats["bandwidth_gb_per_sec"] is stats["bandwidth_share"] is None
    assert describe(stats).startswith("first token after 500 ms, 2.0 tokens/s, ")
    assert describe(stats, num=3).startswith("3 completions, first token after 500 ms (mean), ")
    assert describe(stats | {"tokens_per_sec": None}).startswith("first token after 500 ms, ")
    scored = stats | {"ttft_ms": None}
    assert describe(scored).startswith("2.0 tokens/s, ") and describe(scored).endswith(" GiB per rank, tp 1, float32")


def test_memory_is_this_programs_own_and_not_what_its_parent_held():
    held = bytearray(600 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    code = f"""
import re, resource, sys
from pathlib import Path
{inspect.getsource(report._peak_resident_bytes)}
before, held = _peak_resident_bytes(), bytearray(200 << 20)
held[::4096] = b"x" * len(held[::4096])
print(before, _peak_resident_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 300 << 20 and (200 << 20) * 0.9 < after - before < (200 << 20) * 1.3


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 3352),
        ("NVIDIA H100 PCIe", 2039),
        ("NVIDIA H100 NVL", 3938),
        ("NVIDIA H200", 4800),
        ("NVIDIA H200 NVL", 4800),
        ("NVIDIA B200", 8000),
        ("NVIDIA GH200 480GB", 4000),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA L4", 300),
        ("NVIDIA L40S", 864),
        ("NVIDIA GeForce RTX 9999", None),
    ],
)
def test_the_share_is_of_the_data_sheets_number(monkeypatch, model, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_gb_per_sec(torch.device("cuda", 0)) == peak
    monkeypatch.setattr(report, "peak_gb_per_sec", lambda device: peak)
    timings = Timings([0.1], decode_secs=1.0, num_decode_steps=5, num_tokens=6)
    stats = stats_of(timings, Engine(model, rows=1, room=4), ALONE, work(), secs=1.0)
    assert stats["bandwidth_share"] == (stats["bandwidth_gb_per_sec"] / peak if peak else None)
    assert ("of the memory's bandwidth" in describe(stats)) == (peak is not None)


def test_json_has_no_nan_in_it(capsys):
    print_json({"results": [{"logprob": float("nan")}], "stats": {"tpot_ms": float("inf")}})
    output = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert output == {"results": [{"logprob": None}], "stats": {"tpot_ms": None}}


def test_numbers_of_json_stand_on_one_line(capsys):
    top = {"token": 5, "logprob": -0.5, "top": [(5, -0.5), (7, -1.5)]}
    result = {"id": "é", "tokens": [5, True], "logprobs": [top, top], "prompt_tokens": []}
    print_json({"results": [result], "stats": {"tp": 1, "seed": 0}, "shapes": [[2, 3], None], "names": ["a", {}]})
    assert (
        capsys.readouterr().out
        == """\
{
  "results": [
    {
      "id": "é",
      "tokens": [5, true],
      "logprobs": [
        {"token": 5, "logprob": -0.5, "top": [[5, -0.5], [7, -1.5]]},
        {"token": 5, "logprob": -0.5, "top": [[5, -0.5], [7, -1.5]]}
      ],
      "prompt_tokens": []
    }
  ],
  "stats": {
    "tp": 1,
    "seed": 0
  },
  "shapes": [[2, 3], null],
  "names": [
    "a",
    {}
  ]
}
"""
    )


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(value=ANY_JSON)
def test_json_holds_what_was_to_be_printed(value):
    with redirect_stdout(StringIO()) as printed:
        print_json(value)
    assert json.loads(printed.getvalue()) == value


def test_the_example_of_the_docs_is_what_is_printed(capsys):
    page = (Path(__file__).parents[4] / "docs" / "inference.md").read_text(encoding="utf-8")
    example = page.partition("```json\n")[2].partition("```")[0]
    print_json(json.loads(example))
    assert capsys.readouterr().out == example
    result = result_of(Completion(Prompt("0", "", []), 0, [], "", "stop", None))
    assert [*json.loads(example)["results"][0]] == [*result] and [*json.loads(example)["stats"]] == KEYS
