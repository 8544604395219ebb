"""titan convert, reshard, inspect, diff, verify: exit codes, what goes to stdout, and bad input without a traceback."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.diff import Difference, DiffReport
from tests.models.llama import write as write_llama
from titan_tools import cli
from titan_tools.pages.diff import print_differences


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """hf/, other/ with one weight changed, and plain/: a model without RoPE scaling, which Meta's format can hold."""
    folder = tmp_path_factory.mktemp("commands")
    write_llama(folder / "hf", vocab_size=302)
    write_llama(folder / "plain", vocab_size=302, rope_scaling=None)
    (folder / "other").mkdir()
    shutil.copytree(folder / "hf", folder / "other", dirs_exist_ok=True)
    tensors = load_file(folder / "hf" / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "other" / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def in_folder(monkeypatch, folder):
    monkeypatch.chdir(folder)


def test_reshard_takes_its_options(titan, tmp_path):
    titan("convert", "hf-to-dcp", "hf", tmp_path / "dcp")
    words = ("--num-files", "2", "--dtype", "float64", "--workers", "1", "--no-digest", "--json")
    code, out, err = titan("reshard", tmp_path / "dcp", tmp_path / "two", *words)
    report = json.loads(out)
    assert (code, err, report["cut"]) == (0, "", "2 files") and [*report["dtypes"]] == ["float64"]
    assert len(list((tmp_path / "two").glob("*.distcp"))) == 2
    sums = json.loads((tmp_path / "two" / "titan_manifest.json").read_text())["tensors"]
    assert not any(output.get("digest") for output in sums.values())
    code, out, _ = titan("reshard", tmp_path / "dcp", tmp_path / "many", "--shard-size", "30KB", "--dry-run")
    assert code == 0 and "to write" in out and not (tmp_path / "many").exists()
    for label, output in {"memory": "up to about", "disk": ".* are free$", "time": "about .* GB/s"}.items():
        assert re.search(rf"^  {label} +{output}", out, re.M), label
    code, _, err = titan("reshard", tmp_path / "dcp", tmp_path / "x", "--drop", "weights,model")
    assert code == 2 and "unknown section: weights" in err


def test_every_result_is_one_json_object(titan, tmp_path):
    for arguments, key in (
        (("convert", "hf-to-dcp", "hf", tmp_path / "dcp"), "dropped"),
        (("convert", "auto", "hf", tmp_path / "auto", "--to", "dcp", "--dry-run"), "dtypes"),
        (("reshard", tmp_path / "dcp", tmp_path / "out"), "sections"),
        (("inspect", tmp_path / "dcp"), "lines"),
        (("verify", tmp_path / "dcp"), "ok"),
        (("diff", "hf", tmp_path / "dcp"), "equal"),
    ):
        code, out, _ = titan(*arguments, "--json")
        assert code == 0 and key in json.loads(out)
    assert not (tmp_path / "auto").exists()


def test_differences_exit_with_1(titan):
    code, out, err = titan("diff", "hf", "other")
    assert code == 1 and err == ""
    assert "norm.weight" in out and "max |A-B|" in out and "1 difference; 20 tensors equal" in out
    assert "\nfirst differing tensor: norm.weight\n" in out
    code, out, _ = titan("diff", "hf", "other", "--json")
    assert code == 1 and json.loads(out)["differences"][0]["max_abs"] == 1.0


def test_differences_of_layers_are_one_line(titan, folder, tmp_path):
    shutil.copytree(folder / "hf", tmp_path / "next")
    tensors = load_file(folder / "hf" / "model.safetensors")
    norms = {layer: tensors[f"model.layers.{layer}.input_layernorm.weight"] for layer in (0, 1)}
    norms[0][3] += 0.25
    norms[1][:20] += 0.5
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    tensors["model.layers.0.mlp.up_proj.weight"][1, 1] += 9
    save_file(tensors, tmp_path / "next" / "model.safetensors", metadata={"format": "pt"})

    def rows(*options) -> dict[str, list[str]]:
        lines = titan("diff", "hf", tmp_path / "next", *options).stdout.splitlines()
        assert lines[-1].startswith("4 differences; 17 tensors equal")
        return {cells[0]: cells[1:] for line in lines[2:-2] if (cells := re.split("  +", line))}

    folded = rows()
    assert [*folded] == ["layers.{0..1}.feed_forward.w3.weight", "layers.{0..1}.attention_norm.weight"]
    kind, number, largest, _, detail = folded["layers.{0..1}.attention_norm.weight"]
    assert (kind, number, largest) == ("values", "2", "0.5")
    assert detail == "1 … 20 of 32 values differ, first at [0 … 3]"
    assert folded["layers.{0..1}.feed_forward.w3.weight"][2] == "nan"
    every = rows("--every")
    assert len(every) == 4 and every["layers.0.attention_norm.weight"][1:3] == ["1", "0.25"]
    report = json.loads(titan("diff", "hf", tmp_path / "next", "--json").stdout)
    assert {one["name"] for one in report["differences"]} == every.keys()


def test_differences_of_optimizer_states_are_one_line_for_each_kind(capsys):
    state, settings = "optimizer.state.", "optimizer.param_groups."
    wq, norm = "layers.0.attention.wq.weight", "norm.weight"
    found = [
        Difference(wq, "values", "1 of 8 values differ, first at [0, 0]", 0.1, 0.1),
        Difference(f"{state}{wq}.exp_avg", "values", "7 of 8 values differ, first at [0, 1]", 0.5, 0.1),
        Difference(f"{state}{norm}.exp_avg", "values", "2 of 2 values differ, first at [1]", 0.25, 0.2),
        Difference(f"{state}{norm}.step", "values", "1 of 1 values differ, first at []", 1, 1),
        Difference(f"{state}{wq}.exp_avg_sq", "values", "equal after a transpose; 7 of 8 values differ", 0.5, 0.1),
        Difference(f"{state}{norm}.exp_avg_sq", "values", "2 of 2 values differ, first at [1]", 0.5, 0.1),
        Difference("train_state.step", "values", "1 in A, 2 in B"),
        *(Difference(f"{settings}{name}.lr", "values", "0.1 in A, 0.2 in B") for name in (wq, norm)),
    ]
    print_differences(DiffReport("a", "b", "native names", 0, 0, tuple(found), {}, (), ()), every=False)
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[2:-2]]
    assert [line[0] for line in lines] == [
        wq, f"{state}*.exp_avg", f"{state}{norm}.step", f"{state}{wq}.exp_avg_sq", f"{state}{norm}.exp_avg_sq",
        "train_state.step", f"{settings}*.lr",
    ]  # fmt: skip
    assert lines[1][1:] == ["values", "2", "0.5", "2.00e-01", "2 … 7 of 2 … 8 values differ"]
    assert lines[-1][1:] == ["values", "2", "0.1 in A, 0.2 in B"]


def test_a_mesh_that_cuts_heads_is_refused(titan, tmp_path):
    titan("convert", "hf-to-dcp", "hf", tmp_path / "dcp")
    for command in (("convert", "hf-to-dcp", "hf"), ("reshard", tmp_path / "dcp")):
        code, out, err = titan(*command, tmp_path / "out", "--for-mesh", "tp=3,pp=7")
        assert code == 2 and out == "" and "tp=3 does not divide 4 attention heads" in err
        assert "2 layers cannot be split into 7 pipeline stages" in err
    assert [p.name for p in tmp_path.iterdir()] == ["dcp"]


def test_failed_checks_exit_with_1(titan, tmp_path):
    titan("convert", "hf-to-dcp", "hf", tmp_path / "dcp")
    file = tmp_path / "dcp" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[5000] ^= 16
    file.write_bytes(data)
    code, out, _ = titan("verify", tmp_path / "dcp")
    assert code == 1 and "__0_0.distcp: its bytes have changed (CRC32)" in out and "FAILED" in out
    code, out, _ = titan("verify", tmp_path / "dcp", "--json")
    assert code == 1 and json.loads(out)["ok"] is False
    assert titan("verify", tmp_path / "dcp", "--quick")[0] == 0


def test_inspect_prints_a_table(titan):
    code, out, _ = titan("inspect", "hf")
    assert code == 0
    assert "\n  layers.{0..1} " in out and "\n      q_proj.weight " in out and "[32, 32]" in out
    assert "model: llama3, 2 layers, dim 32, 4 heads (2 for keys and values) of 8" in out
    assert "model.layers.1.self_attn.q_proj.weight" in titan("inspect", "hf", "--every")[1]
    assert len(titan("inspect", "hf", "--every")[1].splitlines()) > len(out.splitlines())


def test_training_checkpoint_says_what_it_leaves_out(titan, tmp_path):
    import torch.distributed.checkpoint as dcp

    titan("convert", "hf-to-dcp", "hf", tmp_path / "dcp")
    names = dcp.FileSystemReader(str(tmp_path / "dcp")).read_metadata().state_dict_metadata
    state = {name: torch.zeros(entry.size) for name, entry in names.items()}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    dcp.save(state | {"train_state": {"step": 3}}, checkpoint_id=str(tmp_path / "step-3"), no_dist=True)
    code, out, _ = titan("convert", "dcp-to-hf", tmp_path / "step-3", tmp_path / "out", "--model-from", "hf")
    assert code == 0 and "left out  train_state (1 entry): only weights are converted" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "hf-to-dcp", "nowhere", "out"], "no such file"),
        (["convert", "dcp-to-hf", "hf", "out"], "not a DCP checkpoint"),
        (["convert", "hf-to-dcp", "nowhere", "hf"], "nowhere: no such file"),
        (["reshard", "nowhere", "hf"], "nowhere: no such file"),
        (["convert", "hf-to-dcp", "plane", "out"], "try: plain"),
        (["convert", "hf-to-dcp", "meta-llama/Llama-3.2-1B", "out"], "try: titan download meta-llama/Llama-3.2-1B"),
        (["verify", "meta-llama/Llama-3.2-1B"], "try: titan download meta-llama/Llama-3.2-1B"),
        (["convert", "hf-to-dcp", "hf", "out.safetensors"], "this is the name of a file"),
        (["convert", "auto", "hf", "out.PT", "--to", "torch"], "try: out.pt\n"),
        (["convert", "hf-to-dcp", "hf", "out", "--for-mesh", ""], "no axis is given"),
        (["convert", "meta-to-dcp", "hf", "out"], "not an original Meta release"),
        (["convert", "hf-to-dcp", "hf", "other"], "exists already"),
        (["convert", "hf-to-dcp", "hf", "out", "--for-mesh", "dpshard=2"], "did you mean dp_shard?"),
        (["convert", "hf-to-dcp", "hf", "out", "--for-mesh", "pp=8"], "pipeline stages"),
        (["convert", "hf-to-dcp", "hf", "out", "--for-mesh", "tp=3", "--dry-run"], "does not divide 4 attention heads"),
        (["convert", "hf-to-dcp", "hf", "out", "--for-mesh", "tp=999999999999", "--dry-run"], "131,072 ranks"),
        (["convert", "hf-to-dcp", "hf", "out", "--dtype", "int8"], "int8"),
        (["convert", "hf-to-dcp", "hf", "out", "--shard-size", "big"], "invalid size for --shard-size"),
        (["convert", "auto", "hf", "out", "--to", "hf", "--for-mesh", "tp=2"], "other formats are not sharded"),
        (["convert", "auto", "hf", "out", "--to", "gguf"], "gguf"),
        (
            ["convert", "auto", "plain", "out", "--to", "meta", "--shard-size", "1GB"],
            "is not supported by an original Meta release",
        ),
        (["convert", "auto", "hf", "out", "--to", "meta"], "params.json cannot express RoPE of type llama3"),
        (["convert", "dcp-to-meta", "plain", "out"], "titan convert hf-to-meta plain out"),
        (
            ["convert", "hf-to-dcp", "hf", "out", "--for-mesh", "tp=2", "--shard-size", "1GB"],
            "cannot be combined with --for-mesh",
        ),
        (["convert", "hf-to-dcp", "hf"], "Missing argument"),
        (["reshard", "hf", "out"], "which has no layout to change"),
        (["reshard", "hf", "out", "--for-mesh", "tp=2", "--num-files", "3"], "cannot be combined"),
        (["diff", "hf", "nowhere"], "no such file"),
        (["inspect", "hf/config.json"], "config.json"),
        (["verify", "nowhere"], "no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(titan, folder, arguments, message):
    before = sorted(p.name for p in folder.iterdir())
    code, out, err = titan(*arguments)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and message in err
    assert sorted(p.name for p in folder.iterdir()) == before


def test_one_of_something_is_reported_as_one(titan, tmp_path):
    tensors = load_file("hf/model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy("hf/config.json", tmp_path)
    _, out, _ = titan("verify", tmp_path)
    assert "1 file of the expected size" in out and "model.norm.weight holds 1 value that is NaN or infinite" in out
    _, _, err = titan("convert", "hf-to-dcp", tmp_path, tmp_path.parent / "out")
    assert "error: 1 tensor holds values that are NaN or infinite:\n  norm.weight: 1 value\n" in err


@pytest.mark.parametrize(
    ("dst", "message"),
    [
        ("data", "is not what would be written"),
        ("hf", "is the source itself"),
        ("hf/inside", "one is inside the other"),
        ("/proc/x", "/proc is not writable"),
    ],
)
def test_overwrite_is_not_advised_where_it_would_be_refused(titan, folder, dst, message):
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "notes.txt").touch()
    for options in ([], ["--overwrite"]):
        code, _, err = titan("convert", "hf-to-dcp", "hf", dst, *options)
        assert code == 2 and message in err and "try:" not in err


def test_inspect_describes_what_is_wrong_with_the_file_that_should_say_the_model(titan, folder, tmp_path):
    shutil.copytree(folder / "hf", tmp_path / "bad")
    config = tmp_path / "bad" / "config.json"
    good = json.loads(config.read_text())
    for content, message in (
        ('{"a": ', f"{config} is not JSON"),
        (json.dumps(good | {"architectures": ["Mamba"]}), f"{config.parent}: config.json names architectures"),
        (json.dumps(good | {"rms_norm_eps": float("nan")}), "rms_norm_eps = nan"),
    ):
        config.write_text(content)
        code, out, _ = titan("inspect", config.parent)
        assert code == 0 and f"model: warning: {tmp_path}" in out and message in out and "model: unknown" not in out
    config.unlink()
    assert "model: unknown" in titan("inspect", config.parent)[1]


def test_a_mismatch_names_the_side_and_keeps_its_indent(titan, folder, tmp_path):
    shutil.copytree(folder / "hf", tmp_path / "bad")
    config = tmp_path / "bad" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    code, _, err = titan("diff", "hf", config.parent)
    assert code == 2 and f"error: {config.parent}: the tensors do not match the model" in err
    code, out, _ = titan("verify", config.parent)
    assert code == 1 and "\n                missing     model.layers.2.input_layernorm.weight" in out


def test_an_intended_change_is_accepted(titan, tmp_path):
    titan("convert", "auto", "hf", tmp_path / "hf", "--to", "hf")
    config = tmp_path / "hf" / "config.json"
    content = config.read_text()
    config.write_text(content.replace('_dropout": 0.0', '_dropout": 0.1'))  # of the same length: the folder opens
    code, out, err = titan("verify", tmp_path / "hf")
    assert code == 1 and "config.json: its bytes have changed" in out
    command = f"titan verify {tmp_path / 'hf'} --accept"
    assert err == f"hint: files that were changed on purpose are accepted by: {command}\n"
    config.write_text(config.read_text().replace("\n", "\n ", 1))
    code, _, err = titan("inspect", tmp_path / "hf")
    assert code == 2 and "changed or damaged since titan wrote it" in err and f"\ntry: {command}\n" in err
    code, out, err = titan(*command.split()[1:], "--json")
    report = json.loads(out)
    assert code == 0 and report["ok"] and [*report["changes"]["files"]] == ["config.json"]
    assert report["changes"]["tensors"] == {} and err == ""
    assert titan("inspect", tmp_path / "hf")[0] == 0
    weights = tmp_path / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, out, err = titan("verify", tmp_path / "hf", "--accept")
    assert code == 1 and "FAILED" in out and err == "titan_manifest.json was not changed\n"
    assert titan("verify", tmp_path / "hf", "--accept", "--quick")[0] == 2


def test_of_a_run_the_newest_step_is_verified(titan, tmp_path):
    for step in (5, 10):
        titan("convert", "hf-to-dcp", "hf", tmp_path / "run" / "checkpoint" / f"step-{step}")
    (tmp_path / "run" / "checkpoint" / "step-20").mkdir()
    code, out, err = titan("verify", tmp_path / "run")
    newest, older = (tmp_path / "run" / "checkpoint" / f"step-{step}" for step in (10, 5))
    assert code == 0 and f"{newest}: all checks passed" in out
    assert "its newest step, step-10, is verified (step-20: no .metadata" in err
    assert err.endswith(f"another step: titan verify {older}\n")
    (newest / "titan_model.json").write_text("{}")
    code, out, _ = titan("verify", tmp_path / "run")  # an older one does not stand in for it
    assert code == 1 and f"{newest}: FAILED" in out


def test_verify_says_what_it_could_not_check(titan, folder, tmp_path):
    shutil.copytree(folder / "hf", tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    code, out, _ = titan("verify", tmp_path / "bare")
    assert code == 0 and "nothing wrong was found; not checked: names and shapes, files, values (" in out


@pytest.mark.parametrize("layers", [4_000_000_000, 9_999])
def test_layers_that_are_not_there_are_reported_before_they_are_counted_out(titan, folder, layers, tmp_path):
    shutil.copytree(folder / "hf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    code, out, _ = titan("verify", tmp_path / "hf")
    assert code == 1 and f"{layers:,}" in out.replace("4000000000", "4,000,000,000")
    code, _, err = titan("convert", "hf-to-dcp", tmp_path / "hf", tmp_path / "out")
    assert code == 2 and "layers" in err and not (tmp_path / "out").exists()


def test_sizes():
    from converters.common.errors import ConfigError
    from converters.common.sizes import parse_shard_size

    sizes = [parse_shard_size(text) for text in ("5GB", "1.5 MiB", "700", "2kb")]
    assert sizes == [5 * 10**9, 1536 * 1024, 700, 2000]
    for text in ("", "GB", "-1GB", "5XB", "1e9"):
        with pytest.raises(ConfigError):
            parse_shard_size(text)


def test_no_command_here_loads_torch(folder, tmp_path):
    """Speed and memory of a copy: a process that imports torch has spent two seconds and 190 MiB before it begins."""
    lines = [
        f"import sys; sys.path.insert(0, {str(Path(cli.__file__).parents[1])!r})",
        "from titan_tools.cli import run",
        f"dst = {str(tmp_path / 'dcp')!r}",
        "for words in (['convert', 'hf-to-dcp', 'hf', dst], ['inspect', 'hf'], ['verify', dst], ['diff', 'hf', dst],",
        "              ['reshard', dst, dst + '2'], ['convert', 'hf-to-dcp', 'plain', dst + '3'],",
        "              ['convert', 'dcp-to-meta', dst + '3', dst + '4']):",
        "    sys.argv = ['titan', *words]",
        "    assert run() == 0, words",
        "assert not {'torch', 'transformers'} & sys.modules.keys()",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
