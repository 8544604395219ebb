"""titan convert: every command by the command line, what it prints, and where --model-from helps."""

import base64
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from converters.engine.copy import DEFAULT_WORKERS
from converters.formats.registry import FORMATS
from tests.models.dense import SCALING
from tests.models.llama import write as write_llama
from titan_tools import cli
from titan_tools.commands import convert_options


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """hf/ as transformers writes it, bare/ without what says the model, and each other format converted from hf/."""
    folder = tmp_path_factory.mktemp("convert")
    write_llama(folder / "hf", vocab_size=302, rope_scaling=SCALING, rope_theta=500000.0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "hf" / name).unlink()
    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "hf" / "tokenizer.model").write_text(ranks)  # what torchtune opens
    shutil.copytree(folder / "hf", folder / "bare")
    (folder / "bare" / "config.json").unlink()
    return folder


@pytest.fixture(autouse=True)
def in_folder(monkeypatch, folder):
    monkeypatch.chdir(folder)


HOLD_LLAMA = [name for name in FORMATS if name != "openai"]


def is_same(titan, a, b):
    code, out, _ = titan("diff", a, b)
    return code == 0 and out.startswith("equal")


@pytest.mark.parametrize(("source", "to"), [("hf", "meta"), ("torch", "hf"), ("meta", "torchtune"), ("hf", "hf")])
def test_every_pair_has_a_command(titan, source, to, tmp_path):
    assert titan("convert", "auto", "hf", tmp_path / "src", "--to", source)[0] == 0
    code, out, _ = titan("convert", f"{source}-to-{to}", tmp_path / "src", tmp_path / "out", "--json")
    assert code == 0 and json.loads(out)["to"] == to
    assert is_same(titan, "hf", tmp_path / "out")
    other = next(name for name in ("dcp", "torch") if name != source)
    code, _, err = titan("convert", f"{other}-to-{to}", tmp_path / "src", tmp_path / "other")
    assert code == 2 and ("try: titan convert" in err) and (source == to or f"convert {source}-to-{to} " in err)
    assert f"titan convert {source}-to-{to} SRC DST" in titan("help", "convert", f"{source}-to-{to}").stdout


def test_a_source_of_another_format_in_the_same_container_is_refused_or_noted(titan, tmp_path):
    for to in ("torch", "meta", "torchtune"):
        style = ["--style", "torchtune"] if to == "torchtune" else []
        assert titan("convert", "auto", "hf", tmp_path / to, "--to", to, *style)[0] == 0
    called = {"hf": "a Hugging Face checkpoint", "torchtune": "a torchtune checkpoint"}
    for source, given in (("hf", "torch"), ("torchtune", "torch"), ("hf", "torchtune")):
        code, _, err = titan("convert", f"{source}-to-dcp", tmp_path / given, tmp_path / "out")
        assert code == 2 and f"not {called[source]}\ntry: titan convert {given}-to-dcp " in err
    for given, name in ((tmp_path / "meta", "Meta"), ("hf", "Hugging Face")):
        code, out, _ = titan("convert", "torchtune-to-dcp", given, tmp_path / "out", "--dry-run")
        assert code == 0 and f"  note      the source has {name}'s names, which torchtune's checkpointers" in out
    for source, given in (("torchtune", tmp_path / "torchtune"), ("meta", tmp_path / "meta"), ("hf", "hf")):
        code, out, _ = titan("convert", f"{source}-to-dcp", given, tmp_path / "out", "--dry-run")
        assert code == 0 and "names, " not in out.split("\n", 1)[1]


def test_options_of_one_format_are_refused_by_the_others(titan, folder, tmp_path):
    given = {
        "--for-mesh=tp=2": {"dcp"},
        "--shard-size=1GB": {"dcp", "hf", "torchtune"},
        "--num-shards=2": {"meta"},
        "--style=hf": {"torchtune"},
        "--device=cpu": {"torchtune"},
        "--dataset=chats.jsonl": {"torchtune"},
    }
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 2
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    for option, formats in given.items():
        for to in HOLD_LLAMA:
            code, _, err = titan("convert", "auto", "hf", tmp_path / "out", "--to", to, option, "--dry-run")
            if to in formats:
                assert code == 0, (option, to, err)
            else:
                assert code == 2 and f"{option.split('=')[0]} is not supported by" in err
    assert list(tmp_path.iterdir()) == []


def test_num_shards_style_and_workers_do_what_they_say(titan, tmp_path):
    titan("convert", "hf-to-dcp", "hf", tmp_path / "dcp", "--workers", "1")
    assert titan("convert", "dcp-to-meta", tmp_path / "dcp", tmp_path / "meta", "--num-shards", "2")[0] == 0
    assert len(list((tmp_path / "meta").glob("consolidated.*.pth"))) == 2
    for style, names in (("hf", "*.safetensors"), ("meta", "consolidated.00.pth"), ("torchtune", "model.pt")):
        out = tmp_path / f"tune-{style}"
        code, _, err = titan("convert", "dcp-to-torchtune", tmp_path / "dcp", out, "--style", style, "--device", "cpu")
        assert code == 0, err
        assert len(list(out.glob(names))) == 1 and "device: cpu" in (out / "torchtune.yaml").read_text()
    assert "greater than or equal to 1" in titan("convert", "hf-to-dcp", "hf", tmp_path / "x", "--workers", "0")[2]
    assert convert_options.DEFAULT_WORKERS == DEFAULT_WORKERS


def test_workers_are_the_threads_that_copy(titan, tmp_path, monkeypatch):
    threads = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers: int):
            threads.append(workers)
            super().__init__(workers)

    monkeypatch.setattr("converters.common.threads.ThreadPoolExecutor", Pool)
    for command in (
        ("convert", "hf-to-dcp", "hf", tmp_path / "dcp", "--workers", 3),
        ("convert", "dcp-to-torch", tmp_path / "dcp", tmp_path / "model.pt", "--workers", 4),
        ("reshard", tmp_path / "dcp", tmp_path / "cut", "--workers", 5),
        ("seed", "debug", tmp_path / "seed", "--workers", 6),
    ):
        assert titan(*command)[0] == 0
    assert threads == [3, 4, 5, 6]
    assert titan("convert", "hf-to-dcp", "hf", tmp_path / "one", "--workers", 1)[0] == 0 and len(threads) == 4


def test_what_was_allowed_is_printed(titan, folder, tmp_path):
    shutil.copytree(folder / "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["vision.weight"] = torch.ones(3)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    allow = ["--allow-missing", "--allow-extra", "--allow-nonfinite"]
    for some in (allow[:2], allow[1:], allow[::2]):
        code, out, err = titan("convert", "hf-to-dcp", tmp_path / "hf", tmp_path / "dcp", *some)
        assert code == 2 and out == "" and not (tmp_path / "dcp").exists()
    assert "lm_head.weight" in err or "vision.weight" in err
    code, out, _ = titan("convert", "hf-to-dcp", tmp_path / "hf", tmp_path / "dcp", *allow)
    assert code == 0
    assert "  missing   lm_head.weight: " in out and "  extra     vision.weight: " in out
    assert "  warning   norm.weight holds 1 value that is NaN or infinite" in out
    code, out, _ = titan("convert", "hf-to-dcp", tmp_path / "hf", tmp_path / "dcp", *allow, "--overwrite", "--json")
    text = json.loads(out)
    assert text["missing"] == ["lm_head.weight"] and text["extra"] == ["vision.weight"]
    assert text["non_finite"] == {"norm.weight": 1}


def test_what_is_next_to_the_weights_is_printed(titan, folder, tmp_path):
    state = load_file(folder / "hf" / "model.safetensors")
    torch.save({"model": state, "optimizer": {"state": {}}, "epoch": 3}, tmp_path / "file.pt")
    code, out, _ = titan("convert", "torch-to-dcp", tmp_path / "file.pt", tmp_path / "dcp", "--model-from", "hf")
    assert code == 0 and "  left out  optimizer, epoch (2 entries): only weights are converted\n" in out
    assert is_same(titan, "hf", tmp_path / "dcp")


def test_what_stays_float32_is_printed(titan, folder, tmp_path):
    shutil.copytree(folder / "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors = {n: t if n == "model.norm.weight" else t.bfloat16() for n, t in tensors.items()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    code, out, _ = titan("convert", "hf-to-dcp", tmp_path / "hf", tmp_path / "dcp", "--dtype", "float16")
    assert code == 0 and "  float32   stays for 1 tensor: norm.weight" in out and "cast      20 tensors" in out
    tensors |= {n: t.float() for n, t in tensors.items() if n.endswith("input_layernorm.weight")}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    _, out, _ = titan("convert", "hf-to-dcp", tmp_path / "hf", tmp_path / "more", "--dtype", "float16")
    assert "tensors: layers.{0..1}.attention_norm.weight, norm.weight\n" in out


def test_a_dry_run_prints_the_needs(titan, tmp_path):
    code, out, err = titan("convert", "hf-to-dcp", "hf", tmp_path / "dcp", "--dry-run")
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []
    assert re.search(r"^  to write +21 tensors, [\d.]+ KiB of float32 in 2 files$", out, re.M)
    assert re.search(r"^  memory +up to about [\d.]+ MiB$", out, re.M)
    assert re.search(r"^  disk +[\d.]+ KiB, [\d.]+ [GT]iB are free$", out, re.M)
    assert re.search(r"^  time +about 0.3 s at 1.2 GB/s", out, re.M)


def test_resume_and_no_digest(titan, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("converters.conversion.execute.write_manifest", _full_disk)
        code, _, err = titan("convert", "hf-to-dcp", "hf", tmp_path / "dcp", "--resume")
        assert code == 2 and "--resume" in err and not (tmp_path / "dcp").exists()
    code, out, _ = titan("convert", "hf-to-dcp", "hf", tmp_path / "dcp", "--resume")
    assert code == 0 and re.search(r"^  resumed +[\d.]+ KiB were written before, and are valid$", out, re.M)
    code, _, _ = titan("convert", "hf-to-dcp", "hf", tmp_path / "dcp", "--overwrite", "--no-digest")
    tensors = json.loads((tmp_path / "dcp" / "titan_manifest.json").read_text())["tensors"]
    assert code == 0 and {tensor["digest"] for tensor in tensors.values()} == {""}


def _full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_every_command_has_the_options_that_they_share(folder):
    shared = {
        *("--model-from", "--dtype", "--workers", "--allow-missing", "--allow-extra", "--allow-nonfinite"),
        *("--no-digest", "--resume", "--overwrite", "--dry-run", "--json"),
    }
    group = next(group for group in cli.app.registered_groups if group.name == "convert")
    for command in group.typer_instance.registered_commands:
        page = CliRunner().invoke(cli.app, ["convert", command.name, "--help"]).output
        assert {option for option in shared if option not in page} == set(), command.name


def test_whatever_does_not_say_its_model_is_helped_by_model_from(titan, folder, tmp_path):
    """The hint names the option, and the command that gave the hint has it."""
    text = ["--model-from", "hf"]
    code, _, err = titan("convert", "hf-to-dcp", "bare", tmp_path / "dcp")
    assert code == 2 and "--model-from" in err
    assert (
        "nowhere: no such file or folder"
        in titan("convert", "hf-to-dcp", "bare", tmp_path / "dcp", *text[:1], "nowhere")[2]
    )
    assert titan("convert", "hf-to-dcp", "bare", tmp_path / "dcp", *text)[0] == 0
    code, out, _ = titan("verify", "bare")
    assert code == 0 and "not possible" in out and "--model-from" in titan("verify", "--help")[1]
    code, out, _ = titan("verify", "bare", *text)
    assert code == 0 and "ok            names and shapes: llama3, 2 layers" in out
    code, out, _ = titan("inspect", "bare")
    assert code == 0 and "--model-from" in out
    assert "llama3, 2 layers" in titan("inspect", "bare", *text)[1]
    assert titan("diff", "bare", "bare", *text)[0] == 0
    (tmp_path / "alone").mkdir()
    shutil.copy(folder / "hf" / "model.safetensors", tmp_path / "alone")
    prompt = ["--prompt", "a", "--max-new-tokens", "2"]
    code, _, err = titan("infer", tmp_path / "alone", *prompt)
    assert code == 2 and "--model-from" in err
    assert titan("infer", tmp_path / "alone", *prompt, *text)[:2] == titan("infer", "hf", *prompt)[:2]


@pytest.mark.parametrize(
    ("arguments", "message", "advice"),
    [
        (["torch-to-dcp", "hf", "out"], "not a torch file", "titan convert hf-to-dcp hf out"),
        (["dcp-to-torch", "hf", "out"], "not a DCP checkpoint", "titan convert hf-to-torch hf out"),
        (["torchtune-to-dcp", "dcp", "out"], "not a torchtune checkpoint", "titan reshard dcp out"),
        (["hf-to-dcp", "dcp", "out"], "not a Hugging Face checkpoint", "titan reshard dcp out"),
        (["hf-to-dcp", "dcp", "out"], "not a Hugging Face checkpoint", "titan convert dcp-to-hf dcp out"),
        (["dcp-to-hf", "hf", "out"], "not a DCP checkpoint", "titan convert hf-to-dcp hf out"),
        (["hf-to-dcp", "meta", "out"], "is an original Meta release, not", "titan convert meta-to-dcp meta out"),
        (["meta-to-dcp", "file.pt", "out"], "is a torch file, not", "titan convert torch-to-dcp file.pt out"),
        (["dcp-to-torchtune", "meta", "out"], "not a DCP checkpoint", "titan convert meta-to-torchtune meta out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_another_kind_of_source_names_the_command_for_it(titan, folder, arguments, message, advice):
    if not (folder / "file.pt").exists():
        for to, dst in (("dcp", "dcp"), ("meta", "meta"), ("torch", "file.pt")):
            assert titan("convert", "auto", "hf", dst, "--to", to)[0] == 0
    code, out, err = titan("convert", *arguments)
    assert code == 2 and out == "" and message in err and f"try: {advice}" in err
    assert not (folder / "out").exists()


def test_one_file_of_a_series_names_the_folder(titan, folder, tmp_path):
    tensors = load_file(folder / "hf" / "model.safetensors")
    part = tmp_path / "model-00001-of-00003.safetensors"
    save_file({name: tensors[name] for name in list(tensors)[:3]}, part)
    for said in (False, True):
        if said:
            shutil.copy(folder / "hf" / "config.json", tmp_path)
        code, out, err = titan("convert", "hf-to-dcp", part, tmp_path / "dcp")
        assert (code, out) == (2, "") and "a part of a checkpoint" in err and err.endswith(f"try: {tmp_path}\n")
    assert titan("convert", "hf-to-dcp", part, tmp_path / "dcp", "--allow-missing")[0] == 0  # who wants it gets it
