"""Conversions that are killed: `kill -9` at 20 points each way; the output is absent or complete, and resumes to it.

C16 of the fault matrix. One process imports everything once and forks a child for each attempt, so that no attempt
pays for its start; the child kills itself at the n-th call of what writes, renames, syncs or deletes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from math import prod
from pathlib import Path
from time import sleep

import pytest
import torch

from converters.api import convert
from converters.common.names import JOURNAL
from converters.verify import verify
from tests.fp8_folders import read_folder, write_fp8
from tests.models.deepseek import write_mtp
from tests.models.gpt_oss import write as write_gpt_oss
from tests.models.gpt_oss import write_mxfp4
from tests.models.llama import write as write_llama

ROOT = Path(__file__).resolve().parents[2]
NUM_POINTS = 20

# argv: work folder, arguments of convert, "new" | "exchange" | "aside", number of points. One line of JSON for each.
KILLER = r"""
import json, os, shutil, signal, sys, threading
from pathlib import Path
import converters.store.commit as committing
import converters.engine.units as units
from converters.store.commit import find_complete
from converters.api import convert
from converters.common.names import DCP_METADATA, MANIFEST

work, asked, how, num_points = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
units.BLOCK_BYTES = units.UNIT_BYTES = 4096
overwrite = how != "new"


def tree(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def watch(at=None):
    # Count every call that changes the disk, and die at one of them: before it, in the middle of it, or after it.
    events, lock = [], threading.Lock()
    if how == "aside":
        committing._renameat2 = lambda *arguments: False

    def counted(kind, call):
        def run(*arguments, **options):
            with lock:
                events.append((kind, str(arguments[0])))
                mine = at is not None and len(events) - 1 == at[0]
            if not mine:
                return call(*arguments, **options)
            if at[1] == "middle" and kind in ("pwrite", "write"):
                half = bytes(arguments[1])[: len(arguments[1]) // 2]
                call(arguments[0], half, *arguments[2:])
            elif at[1] == "after":
                call(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return run

    for name in ("pwrite", "write", "replace", "rename", "fsync", "unlink", "rmdir"):
        setattr(os, name, counted(name, getattr(os, name)))
    if how != "aside":
        committing._renameat2 = counted("rename", committing._renameat2)
    return events


def attempt(dst, at=None, resume=False):
    # In a child; its exit status, and what it has to say.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        say = os.fdopen(writer, "w")
        try:
            events = watch(at)
            report = convert(work / "src", dst, **asked, resume=resume, overwrite=overwrite)
            json.dump({"events": events, "resumed": report.resumed_bytes, "bytes": report.num_bytes}, say)
        except BaseException as error:
            json.dump({"error": repr(error)}, say)
        say.close()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as listen:
        said = listen.read()
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, json.loads(said) if said else {}


def old_output(dst):
    if overwrite:
        shutil.copytree(work / "expected", dst)
        (dst / "only_old").touch()


place = work / "trace"
place.mkdir()
old_output(place / "out")
events = attempt(place / "out")[1]["events"]
expected = tree(work / "expected")
assert tree(place / "out") == expected


def index_of(kind, first=True):
    found = [n for n, event in enumerate(events) if event[0] == kind]
    return found[0 if first else -1]


def is_pwrite(n):
    return events[n][0] == "pwrite"


data = [n for n in range(index_of("write", first=False)) if is_pwrite(n)]  # the last line of the journal ends the copy
shells = [n for n in range(len(events)) if is_pwrite(n) and n > data[-1]]
manifest, renames = index_of("replace"), [n for n, event in enumerate(events) if event[0] == "rename"]
points = [
    (0, "before"), (data[0], "before"), (data[0], "middle"), (data[-1], "after"), (shells[0], "before"),
    (shells[0], "after"), (shells[-1], "before"), (shells[-1], "middle"), (manifest, "before"), (manifest, "after"),
    (index_of("fsync", first=False) - 3, "after"), (renames[0], "before"),
    (renames[0], "after"), (renames[-1], "after"),
    (len(events) - 2, "before"), (index_of("write", first=False), "middle"),
]
spread = num_points - len(points)
points += [(data[len(data) * k // (spread + 1)], "middle" if k % 2 else "after") for k in range(1, spread + 1)]
if overwrite:  # the rest is as it is without
    points = [at for at in points if at[0] >= manifest]
for number, at in enumerate(points):
    place = work / f"point-{number}"
    place.mkdir()
    dst = place / "out"
    old_output(dst)
    killed, said = attempt(dst, at)
    found = find_complete(dst)
    found = tree(found) if found.exists() else None
    states = {"absent": None, "complete": expected, "old": {**expected, "only_old": b""}}
    state = next((name for name, files in states.items() if files == found), "neither")
    left = sorted(p.name for p in place.iterdir() if p.name != "out")
    done_before = state == "complete" and not overwrite
    if done_before:  # --resume finds nothing to do: the place is taken
        shutil.rmtree(dst)
    error, again = attempt(dst, resume=number % 4 != 3)
    print(json.dumps({
        "at": at, "event": events[at[0]], "killed": killed, "said": said, "state": state, "left": left,
        "again": {k: v for k, v in again.items() if k != "events"},
        "same": dst.exists() and tree(dst) == expected,
        "left_after": sorted(p.name for p in place.iterdir() if p.name != "out"),
        "in_data": data[1] < at[0] < renames[0], "resume": number % 4 != 3,
    }), flush=True)
    shutil.rmtree(place)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    write_llama(folder / "hf", num_hidden_layers=3, hidden_size=64, intermediate_size=128, rope_scaling=None)
    convert(folder / "hf", folder / "dcp", to="dcp")
    return folder


@pytest.fixture(scope="module")
def quantized(sources):
    """Those of DeepSeek and GPT-OSS, in the same folder."""
    folder = sources
    write_mtp(folder / "mtp", dtype="bfloat16", **DEEPSEEK)
    write_fp8(folder / "fp8", folder / "mtp", files=2)
    convert(folder / "fp8", folder / "values", to="dcp", mtp="keep")
    write_gpt_oss(folder / "oss", num_hidden_layers=8, num_local_experts=4)
    write_mxfp4(folder / "mxfp4", folder / "oss")
    convert(folder / "mxfp4", folder / "oss values", to="dcp")


# Published shapes where they matter: kv_a has 576 rows, the last block of 64; a dense layer, one of experts and one for
# multi-token prediction
DEEPSEEK = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "moe_intermediate_size": 136,
    "num_hidden_layers": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
CASES = {  # source, arguments of convert
    "dcp": ("hf", {"to": "dcp"}),
    "hf": ("dcp", {"to": "hf"}),
    "deepseek to dcp": ("fp8", {"to": "dcp", "mtp": "keep"}),
    "gpt-oss to dcp": ("mxfp4", {"to": "dcp"}),
    "gpt-oss to hf": ("mxfp4", {"to": "hf"}),
    "gpt-oss to mxfp4": ("oss values", {"to": "hf", "quantize": "mxfp4"}),
    "deepseek to fp8": ("values", {"to": "hf", "mtp": "keep", "quantize": "fp8"}),
    "deepseek to fp8, kept scales": ("values", {"to": "hf", "mtp": "keep", "quantize": "fp8", "scales_from": "fp8"}),
}


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("dcp", "new"),
        *(
            pytest.param(case, how, marks=pytest.mark.slow)
            for case, how in [("hf", "exchange"), ("dcp", "aside"), *((case, "new") for case in CASES if case != "dcp")]
        ),
    ],
)
def test_c16_a_kill_at_any_point_leaves_nothing_or_everything_and_resumes_to_it(request, sources, tmp_path, case, how):
    """`aside`: a file system that cannot exchange two names, where a kill can come between two renames."""
    source, asked = CASES[case]
    if source not in ("hf", "dcp"):
        request.getfixturevalue("quantized")
    shutil.copytree(sources / source, tmp_path / "src")
    if "scales_from" in asked:
        asked = asked | {"scales_from": str(sources / asked["scales_from"])}
    convert(tmp_path / "src", tmp_path / "expected", **asked)
    if "scales_from" in asked:
        published, made = (read_folder(folder) for folder in (sources / "fp8", tmp_path / "expected"))
        assert made.keys() == published.keys() and "model.layers.2.eh_proj.weight" in made
        assert all(torch.equal(made[n].view(torch.uint8), t.view(torch.uint8)) for n, t in published.items())
        assert made["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 1)
    done = subprocess.run(
        [sys.executable, "-P", "-c", KILLER, str(tmp_path), json.dumps(asked), how, str(NUM_POINTS)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    points = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(points) == NUM_POINTS if how == "new" else len(points) > 5
    for point in points:
        assert point["killed"] and not point["said"], point
        assert point["state"] in (("absent", "complete") if how == "new" else ("old", "complete")), point
        assert point["same"] and not point["left_after"], point
        assert "error" not in point["again"], point
        if point["state"] != "complete":
            assert any(name.startswith(".tmp-") for name in point["left"]), point
        if point["in_data"] and point["resume"]:
            assert point["again"]["resumed"] > 0, point
        if not point["resume"]:
            assert point["again"]["resumed"] == 0, point
    assert {"complete"} < {point["state"] for point in points}
    if how == "new":
        resumed = {point["again"]["resumed"] for point in points}
        assert len(resumed) > 4 and max(resumed) > 0.9 * points[0]["again"]["bytes"]  # from nothing to everything


def _sparse_llama(folder: Path, *, num_layers: int) -> None:
    """About 34 MB a layer, of zeros that take no room."""
    config = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "rms_norm_eps": 1e-5}
    config |= {"num_hidden_layers": num_layers, "tie_word_embeddings": True, "max_position_embeddings": 64}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    inside = {
        "self_attn.q_proj": [1024, 1024],
        "self_attn.k_proj": [256, 1024],
        "self_attn.v_proj": [256, 1024],
        "self_attn.o_proj": [1024, 1024],
        "mlp.gate_proj": [4096, 1024],
        "mlp.up_proj": [4096, 1024],
        "mlp.down_proj": [1024, 4096],
        "input_layernorm": [1024],
        "post_attention_layernorm": [1024],
    }
    shapes = {"model.embed_tokens.weight": [512, 1024], "model.norm.weight": [1024]}
    for n in range(num_layers):
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in inside.items()}
    header, position = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + 2 * prod(shape)]}
        position += 2 * prod(shape)
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)


def _start(*arguments) -> subprocess.Popen:
    command = [sys.executable, "-P", "-m", "titan_tools", "convert", "hf-to-dcp", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for_records(parent: Path, process: subprocess.Popen, *, at_least: int) -> None:
    while process.poll() is None:
        journals = list(parent.glob(f".tmp-*/{JOURNAL}"))
        if journals and journals[0].read_bytes().count(b"\n") > at_least:
            return
        sleep(0.002)
    pytest.fail(f"it ended before it could be stopped: {process.communicate()}")


@pytest.fixture
def hearing_interrupts():
    """What a shell starts in the background ignores Ctrl-C, and so would the children of such a pytest."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hearing_interrupts")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_what_an_interrupt_ends_is_kept_with_resume_and_reported(tmp_path, number, code):
    _sparse_llama(tmp_path / "src", num_layers=12)
    process = _start(tmp_path / "src", tmp_path / "out", "--resume")
    _wait_for_records(tmp_path, process, at_least=6)
    process.send_signal(signal.SIGSTOP)
    beside = _start(tmp_path / "src", tmp_path / "out", "--resume")
    _, said = beside.communicate()
    assert beside.returncode == 2 and "another conversion is writing it" in said
    process.send_signal(number)  # before it goes on, or it might be done by then
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate()
    assert process.returncode == code, said
    assert "run again with --resume to continue" in said
    assert not (tmp_path / "out").exists()
    again = _start(tmp_path / "src", tmp_path / "out", "--resume", "--json")
    output, said = again.communicate()
    assert again.returncode == 0, said
    assert json.loads(output)["resumed_bytes"] > 6 * 2**20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src"]
    assert verify(tmp_path / "out").ok
