"""A dry run: everything checked, the needs reported, nothing written; also of models that no disk here could hold."""

import base64
import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from converters.common.box import TensorInfo
from converters.common.errors import CheckpointError
from converters.conversion import execute
from converters.conversion.needs import COPY_BYTES_PER_SEC, WORKER_BYTES
from converters.engine.copy import DEFAULT_WORKERS
from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from tests.big_shapes import LLAMA_405B_CONFIG, llama_405b, num_bytes, write_sparse_dcp, write_sparse_hf
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama
from tests.models.names import native_name

ROOT = Path(__file__).resolve().parents[3]
# `titan` as it is started, and the kernel's account of the process when it is done
MEASURED = """
import atexit, pathlib, sys
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text(), file=sys.stderr))
from titan_tools.cli import main
from tests.models.names import native_name
main()
"""


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, vocab_size=302)
    return folder


@pytest.mark.parametrize(
    ("to", "dst", "options"),
    [
        ("dcp", "out", OutputOptions(mesh=MeshShape(dp_shard=3, tp=2))),
        ("hf", "out", OutputOptions(shard_bytes=30_000)),
        ("torch", "out.pt", OutputOptions()),
    ],
)
def test_it_describes_what_the_real_run_does(hf, to, dst, options, tmp_path):
    planned = convert(hf, tmp_path / dst, to=to, options=options, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    free = shutil.disk_usage(tmp_path).free
    done = convert(hf, tmp_path / dst, to=to, options=options)
    assert done.needs is None
    place = tmp_path / dst
    files = [place] if place.is_file() else [p for p in place.iterdir() if p.suffix != ".json" or "index" in p.name]
    files = [p for p in files if p.is_file()]
    assert planned.num_bytes == sum(p.stat().st_size for p in files)
    written = place.stat().st_size if place.is_file() else sum(p.stat().st_size for p in place.rglob("*"))
    assert written <= planned.needs.disk_bytes < written + 2**20
    assert planned.num_files == len(files)
    assert abs(planned.needs.free_bytes - free) < 2**30 and planned.needs.fits


def test_workers_and_chunks_cost_memory_and_bytes_cost_time(hf, tmp_path):
    def needs(**options):
        return convert(hf, tmp_path / "out", to="dcp", dry_run=True, **options).needs

    plain, many = needs(), needs(workers=DEFAULT_WORKERS + 3)
    assert many.memory_bytes - plain.memory_bytes == 3 * WORKER_BYTES
    assert plain.memory_bytes < (128 + 16 * DEFAULT_WORKERS) * 2**20
    cut = needs(options=OutputOptions(mesh=MeshShape(dp_shard=32, tp=2)))
    assert cut.memory_bytes > plain.memory_bytes and cut.secs > plain.secs
    assert plain.bytes_per_sec == COPY_BYTES_PER_SEC and plain.secs > plain.disk_bytes / COPY_BYTES_PER_SEC


@pytest.mark.parametrize("way", ["dcp", "out.pt", "reshard"])
def test_a_dry_run_says_that_it_fits_exactly_where_a_real_one_starts(hf, way, tmp_path, monkeypatch):
    convert(hf, tmp_path / "src", to="dcp")

    def run(dry_run):
        if way == "reshard":
            return reshard(tmp_path / "src", tmp_path / "out", num_files=3, dry_run=dry_run)
        return convert(hf, tmp_path / way, to="torch" if way == "out.pt" else way, dry_run=dry_run)

    usage, needs = shutil.disk_usage(tmp_path), run(True).needs
    assert needs.fits and needs.disk_bytes < 2**20 + sum(p.stat().st_size for p in (tmp_path / "src").rglob("*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needs.disk_bytes - 1))
    assert not run(True).needs.fits
    with pytest.raises(CheckpointError, match="free on that disk"):
        run(False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needs.disk_bytes))
    assert run(True).needs.fits
    run(False)


def test_room_is_reckoned_for_all_that_is_written_until_the_end(tmp_path, monkeypatch):
    """Many small chunks, a large tokenizer to be translated, and the journal, which is gone afterwards."""
    write_llama(tmp_path / "hf", vocab_size=800, num_hidden_layers=12, rope_scaling=None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hf" / name).unlink()
    ranks = [bytes([byte]) for byte in range(256)] + [bytes([97 + n // 26, 97 + n % 26]) for n in range(244)]
    lines = (f"{base64.b64encode(rank).decode()} {number}\n" for number, rank in enumerate(ranks))
    (tmp_path / "hf" / "tokenizer.model").write_text("".join(lines))
    held, sealed = [], execute.write_manifest

    def write_manifest(output, **sums):
        sealed(output, **sums)
        held.append(sum(path.stat().st_size for path in output.folder.parent.rglob("*") if path.is_file()))

    monkeypatch.setattr(execute, "write_manifest", write_manifest)
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=2, tp=2, pp=4)))
    for to in ("hf", "meta", "torchtune"):
        planned = convert(tmp_path / "dcp", tmp_path / f"to-{to}", to=to, dry_run=True)
        convert(tmp_path / "dcp", tmp_path / f"to-{to}", to=to)
        assert held[-1] <= planned.needs.disk_bytes < 1.5 * held[-1] + 2**18


def test_a_full_disk_is_reported_and_no_error(hf, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    needs = convert(hf, tmp_path / "out", to="dcp", dry_run=True).needs
    assert (needs.free_bytes, needs.fits) == (10_000, False)


def test_a_place_that_takes_no_files_is_an_error(hf):
    with pytest.raises(CheckpointError, match="is not writable"):
        convert(hf, "/proc/out", to="dcp", dry_run=True)


def qwen_671b() -> tuple[dict[str, TensorInfo], dict]:
    """A dense model of 671B parameters in Qwen 3's shapes: q/k norms, head_dim apart from dim / heads."""
    dim, ffn, vocab, layers, heads, kv_heads, head_dim = 18432, 61440, 151936, 165, 128, 8, 128
    inside = {
        "self_attn.q_proj": (heads * head_dim, dim),
        "self_attn.k_proj": (kv_heads * head_dim, dim),
        "self_attn.v_proj": (kv_heads * head_dim, dim),
        "self_attn.o_proj": (dim, heads * head_dim),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (ffn, dim),
        "mlp.up_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    shapes = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,), "lm_head.weight": (vocab, dim)}
    for n in range(layers):
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in inside.items()}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return {name: TensorInfo("bfloat16", shape) for name, shape in shapes.items()}, config


def qwen_235b() -> tuple[dict[str, TensorInfo], dict]:
    """Qwen 3 235B-A22B as the hub has it: 36,945 tensors, one per expert."""
    dim, hidden, q, kv = 4096, 1536, 64 * 128, 4 * 128
    shapes = {"model.embed_tokens.weight": (151936, dim), "model.norm.weight": (dim,), "lm_head.weight": (151936, dim)}
    for n in range(94):
        layer = f"model.layers.{n}."
        shapes |= {f"{layer}{name}.weight": (dim,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}self_attn.{name}.weight": (128,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (kv, dim) for name in "kv"}
        shapes |= {f"{layer}self_attn.q_proj.weight": (q, dim), f"{layer}self_attn.o_proj.weight": (dim, q)}
        shapes[f"{layer}mlp.gate.weight"] = (128, dim)
        for e in range(128):
            expert = f"{layer}mlp.experts.{e}."
            shapes |= {f"{expert}{name}_proj.weight": (hidden, dim) for name in ("gate", "up")}
            shapes[f"{expert}down_proj.weight"] = (dim, hidden)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": dim,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": hidden,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "torch_dtype": "bfloat16",
    }
    return {name: TensorInfo("bfloat16", shape) for name, shape in shapes.items()}, config


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """llama/ (405B), qwen/ (671B) and moe/ (235B) as the hub would have them, dcp/ a training job's 405B."""
    folder = tmp_path_factory.mktemp("big")
    write_sparse_hf(folder / "llama", llama_405b(), shard_bytes=5 * 10**9, config=LLAMA_405B_CONFIG)
    tensors, config = qwen_671b()
    assert 665e9 < num_bytes(tensors) / 2 < 680e9
    write_sparse_hf(folder / "qwen", tensors, shard_bytes=5 * 10**9, config=config)
    tensors, config = qwen_235b()
    assert num_bytes(tensors) == 2 * 235_093_634_560 and len(tensors) == 36_945
    write_sparse_hf(folder / "moe", tensors, shard_bytes=4 * 10**9, config=config)
    native = convert_names(llama_405b())
    write_sparse_dcp(folder / "dcp", native)
    shutil.copy(folder / "llama" / "config.json", folder / "dcp")
    return folder


def convert_names(tensors):
    return {native_name(name): info for name, info in tensors.items()}


MESH = ["--for-mesh", "dp_shard=64,tp=8"]


@pytest.mark.parametrize(
    ("source", "to", "options"),
    [
        ("llama", "dcp", []),
        ("qwen", "dcp", []),
        ("moe", "dcp", ["--for-mesh", "dp_shard=64"]),
        pytest.param("moe", "hf", ["--fused-experts"], marks=pytest.mark.slow),
        pytest.param("moe", "hf", [], marks=pytest.mark.slow),
        ("dcp", "hf", []),
        ("dcp", "torch", []),
        ("dcp", "meta", ["--num-shards", "8"]),
        pytest.param("llama", "dcp", MESH, marks=pytest.mark.slow),
        pytest.param("qwen", "dcp", MESH, marks=pytest.mark.slow),
        pytest.param("dcp", "dcp", MESH, marks=pytest.mark.slow),
    ],
)
def test_the_largest_models_within_5_seconds_and_500_mb(big, source, to, options, tmp_path):
    command = ["convert", "auto", big / source, tmp_path / "out", "--to", to, *options, "--dry-run", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, command)], cwd=ROOT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    secs = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # its own, however busy the machine
    assert done.returncode == 0, done.stderr
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", done.stderr, re.MULTILINE)
    assert int(peak) * 1024 < 500e6 and secs < 5
    report = json.loads(done.stdout)
    assert report["num_bytes"] > {"qwen": 1.34e12, "moe": 4.7e11}.get(source, 8.1e11)
    if options == MESH:
        assert report["num_files"] == 513  # one for each rank, and .metadata
