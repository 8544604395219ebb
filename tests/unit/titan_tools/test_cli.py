"""The command line: help pages and their examples, errors, exit codes, speed of `titan --help`."""

import errno
import functools
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from converters.store import hub_names
from converters.store.location import locate
from titan_tools import cli
from titan_tools.cli import app
from titan_tools.launch.failures import RankFailure
from trainer.config.sections import Config

ROOT = Path(__file__).resolve().parents[3]
TITAN = [sys.executable, "-m", "titan_tools"]
COMMANDS = {
    "convert", "inspect", "diff", "verify", "reshard", "seed", "estimate-memory", "train", "infer", "data", "config",
    "models", "download",
}  # fmt: skip


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TITAN, *arguments], capture_output=True, text=True, timeout=120)


def all_pages() -> list[list[str]]:
    """The words of every command that does something: `["reshard"]`, `["convert", "hf-to-dcp"]`, …"""
    pages = [[info.name] for info in app.registered_commands]
    for group in app.registered_groups:
        pages += [[group.name, info.name] for info in group.typer_instance.registered_commands]
    return pages


def examples_of(page: list[str]) -> list[str]:
    shown = CliRunner().invoke(app, [*page, "--help"]).output.splitlines()
    start = next(i for i, line in enumerate(shown) if line.strip() == "Examples:")
    rest = (line.strip() for line in shown[start + 1 :])
    return [line for line in functools.reduce(_until_blank, rest, ([], False))[0] if line]


def _until_blank(state, line):
    found, ended = state
    return (found, True) if ended or not line else ([*found, line], False)


def parse_only() -> typer.Typer:
    """The same commands with the same signatures, doing nothing: what parses here is an example that can be typed."""

    def copy(source: typer.Typer) -> typer.Typer:
        made = typer.Typer()
        for info in source.registered_commands:
            idle = functools.wraps(info.callback)(lambda *args, **kwargs: None)
            made.command(info.name, context_settings=info.context_settings)(idle)
        for group in source.registered_groups:
            made.add_typer(copy(group.typer_instance), name=group.name)
        return made

    return copy(app)


def test_all_commands_are_registered():
    assert {info.name for info in app.registered_commands} | {g.name for g in app.registered_groups} >= COMMANDS


@pytest.mark.parametrize("page", all_pages(), ids=" ".join)
def test_help_has_two_examples_that_parse(page, monkeypatch):
    monkeypatch.setattr(hub_names, "find_local", locate)  # no model of the examples is in the cache
    examples = examples_of(page)
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(example)
        assert words[: len(page) + 1] == ["titan", *page], example
        done = CliRunner().invoke(parse_only(), words[1:])
        assert done.exit_code == 0, f"{example}\n{done.output}"


def test_help_is_fast():
    """At most 0.3 s: processor time, the best of five, because the machine may be busy with other tests."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    best = float("inf")
    for _ in range(5):
        start = spent()
        assert run_process("--help").returncode == 0
        best = min(best, spent() - start)
    assert best <= 0.3


@pytest.mark.parametrize(
    "arguments",
    [["no-such-command"], ["models", "--no-such-option"], ["diff", "only-one"], ["reshard"], ["inspect", "/nowhere"]],
    ids=" ".join,
)
def test_wrong_usage_is_two_lines_and_exit_2(titan, arguments):
    done = titan(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["no-such-command", "--json"], "usage", "No such command"),
        (["models", "--json", "--no-such-option"], "usage", "No such option"),
        (["diff", "only-one", "--json"], "usage", "Missing argument"),
        (["convert", "native-to-hf", "a", "b", "--json"], "usage", "'native': no such format; there are dcp, hf,"),
        (["convert", "hf-to-mta", "--json"], "usage", "'mta': no such format"),
        (["convert", "auto", "a", "b", "--to", "gguf", "--json"], "usage", "'gguf' is not one of"),
        (["data", "prepare", "--vocab-size", "many", "--json"], "usage", "valid integer"),
        (["inspect", "/nowhere", "--json"], "checkpoint", "/nowhere: no such file or folder"),
        (["config", "show", "debug", "--training.stepz", "1", "--json"], "config", "training.stepz"),
        (["data", "prepare", "/nowhere", "--json"], "data", "/nowhere"),
        (["estimate-memory", "debug", "--gpu", "abacus", "--json"], "config", "abacus"),
        (["train", "nowhere.toml", "--dry-run", "--json"], "config", "nowhere.toml"),
        (["infer", "/nowhere", "--prompt", "a", "--json"], "checkpoint", "/nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_with_json_an_error_is_one_object_on_stdout(titan, arguments, kind, message):
    done = titan(*arguments)
    assert (done.returncode, *json.loads(done.stdout)) == (2, "error")
    error = json.loads(done.stdout)["error"]
    assert [*error] == ["kind", "message", "hint", "exit_code"]
    assert (error["kind"], error["exit_code"]) == (kind, 2) and message in error["message"]
    without_name = done.stderr.removeprefix("error: ").replace("hint: ", "", 1)  # of the first line of each
    assert without_name == "\n".join(filter(None, [error["message"], error["hint"]])) + "\n"
    arguments.remove("--json")
    assert titan(*arguments).stdout == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("moment", ["trainer.config.load.load_config", "titan_tools.launch.training.find_device"])
def test_a_stop_request_while_a_run_starts_is_one_that_a_scheduler_resumes(titan, monkeypatch, number, moment):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    monkeypatch.setattr(moment, lambda *_, **__: os.kill(os.getpid(), number))
    if "find_device" in moment:
        monkeypatch.setattr("trainer.config.load.load_config", lambda *_: Config())
    try:
        done = titan("train", "debug")
        assert (done.returncode, done.stdout) == (75, "")
        assert done.stderr.endswith("error: stopped on request while starting: there was nothing to save yet\n")
        if number == signal.SIGTERM and "load" in moment:
            assert titan("train", "debug", "--dry-run").returncode == 143
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [
        (KeyboardInterrupt(), "interrupted", 130),
        (cli.Terminated(), "terminated", 143),
        (PermissionError(errno.EACCES, "Permission denied", "a"), "machine", 2),
        (RankFailure("lost", exit_code=3), "rank", 3),
        (ZeroDivisionError("a slip"), "internal", 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_with_json_other_ends_are_objects_too(monkeypatch, capsys, raised, kind, code):
    def fail(**options):
        raise raised

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["titan", "models", "--json"])
    assert cli.run() == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["exit_code"]) == (kind, code)
    monkeypatch.setattr(sys, "argv", ["titan", "infer", "a", "--", "--json"])
    assert cli.run() == code and capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "argv", ["titan", "models", "--json"])
    monkeypatch.setenv("RANK", "1")  # of torchrun: the first rank prints it
    assert cli.run() == code and capsys.readouterr().out == ""


def test_sigterm_leaves_no_partial_output(tmp_path):
    less = ("--training.dtype", "bfloat16", "--workers", "1")  # 1.2 GB
    command = [*TITAN, "seed", "qwen3_0.6b", str(tmp_path / "seed"), *less]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob(".tmp-*/*")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.splitlines()[-1]) == (143, "", "error: ended by SIGTERM")
    assert list(tmp_path.iterdir()) == []


def test_another_trainer_package_is_refused(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise SystemExit('the wrong package ran')\n")
    root = Path(__file__).resolve().parents[3]
    code = f"import sys; sys.path.append({str(root)!r}); from titan_tools.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "models"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not titan's" in done.stderr and "the wrong package ran" not in done.stderr + done.stdout


def test_ctrl_c_while_the_command_line_is_read_is_reported(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli._Commands, "parse_args", interrupted)
    monkeypatch.setattr(sys, "argv", ["titan", "models", "--json"])
    assert cli.run() == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["kind"] == "interrupted" and err.endswith("error: interrupted\n")


def test_the_version_as_json_has_the_tested_versions(titan):
    found = json.loads(titan("--version", "--json").stdout)
    assert found["installed"]["torch"] == torch.__version__ and found["torchtitan"] == "0.2.2"
    page = (ROOT / "docs" / "versions.md").read_text()
    for cell in found["tested"]:
        assert " | ".join(cell.values()).replace("|  |", "| |") in page.replace("|  |", "| |"), cell["cell"]
    assert titan("--json", "models").returncode == 2


def test_help_has_a_short_form_and_there_is_a_version(titan):
    assert titan("-h").stdout == titan("--help").stdout
    assert titan("--version").stdout.startswith("titan ") and titan("-V").stdout == titan("--version").stdout


def test_help_is_also_a_command(titan):
    assert titan("help").stdout == titan("--help").stdout
    assert titan("help", "convert", "auto").stdout == titan("convert", "auto", "--help").stdout
    wrong = titan("help", "nothing")
    assert wrong.returncode == 2 and "No such command 'nothing'" in wrong.stderr


@pytest.mark.parametrize("group", ["convert", "data", "config"])
def test_help_of_a_group_has_examples_that_parse(group):
    for example in examples_of([group]):
        words = shlex.split(example)
        assert words[0] == "titan"
        done = CliRunner().invoke(parse_only(), [*words[2:], "--help"] if words[1] == "help" else words[1:])
        assert done.exit_code == 0, f"{example}\n{done.output}"
    assert len(examples_of([group])) >= 2


def test_help_of_training_names_the_list_of_keys(titan):
    shown = " ".join(titan("train", "-h").stdout.split())
    assert "`titan config show CONFIG` lists them" in shown and "<int range>" not in shown
    shown = titan("infer", "-h").stdout
    assert "--truncate left" in shown and "[-]" not in shown and "- <str>" not in shown


_WITH_PLACES = [["convert", "auto"], ["convert", "dcp-to-torch"], ["data", "prepare"], ["estimate-memory"], *(
    [name] for name in ("reshard", "seed", "inspect", "diff", "verify", "download", "infer")
)]  # fmt: skip


@pytest.mark.parametrize("command", _WITH_PLACES, ids=" ".join)
def test_help_has_a_name_for_every_argument_and_value(titan, command):
    shown = titan(*command, "--help").stdout
    arguments = [
        line.split()[0] for line in shown.split("Arguments:")[1].split("Options:")[0].splitlines() if line[2:3].strip()
    ]
    assert arguments and all(name.rstrip(".").isupper() or name == "-" for name in arguments)
    kinds = ("<str>", "<int>", "<int ", "<float>", "<path>")
    assert not [line for line in shown.splitlines() if line.startswith("  --") and any(kind in line for kind in kinds)]


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (MemoryError(), "error: out of memory\n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "error: out of memory\n"),
        (RuntimeError("CUDA out of memory. GPU 0 …"), "error: out of memory\nhint: CUDA out of memory. GPU 0 …\n"),
        (RuntimeError("can't start new thread"), "error: no more threads can be started on this machine\n"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize(
    ("command", "has_workers"),
    [(["convert", "auto"], True), (["--import", "m", "reshard"], True), (["infer"], False), (["convert"], False)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_out_of_memory_and_threads_are_not_internal_errors(monkeypatch, capsys, problem, message, command, has_workers):
    def fails(self, *_, **__):
        raise problem

    monkeypatch.setattr(typer.Typer, "__call__", fails)
    monkeypatch.setattr(sys, "argv", ["titan", *command])
    assert cli.run() == 2
    err = capsys.readouterr().err
    assert err.startswith(message) and ("--workers 1" in err) == has_workers and "Traceback" not in err


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="bash's limit of a file's size is Linux'")
def test_a_file_size_limit_is_not_an_internal_error(tmp_path):
    command = f"ulimit -f 0; exec {sys.executable} -m titan_tools models > {shlex.quote(str(tmp_path / 'out'))}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, "error: standard output: File too large\n")


@pytest.mark.parametrize(
    "settings", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_characters_outside_the_locale_are_replaced(settings, tmp_path):
    environment = os.environ | settings | {"HOME": "/nonexistent", "COLUMNS": "10"}
    command = [sys.executable, "-m", "titan_tools", "config", "init"]
    shown = subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"??????" in shown.stdout and b"llama3_8b" in shown.stdout


@pytest.mark.parametrize("group", [[], ["convert"], ["config"]], ids=str)
def test_a_group_without_a_command_shows_its_help(titan, group):
    done = titan(*group)
    assert done.returncode == 2 and "Usage: titan" in done.stderr and "error:" not in done.stderr


def test_a_closed_pipe_is_not_a_failed_check():
    shell = f"{shlex.join([*TITAN, 'models', '--json'])} | true; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", shell], capture_output=True, timeout=120).returncode in (0, 141)


def test_messages_to_a_closed_stderr_do_not_go_to_stdout(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["titan", "inspect", "no such place"])
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.run() == 2 and capsys.readouterr().out == ""


def test_a_full_stdout_is_one_error_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*TITAN, "models"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: standard output: No space left on device"]


@pytest.mark.parametrize(
    "page", [[], *([group.name] for group in app.registered_groups)], ids=lambda page: " ".join(["titan", *page])
)
def test_the_list_of_commands_is_not_truncated(page):
    shown = CliRunner().invoke(app, [*page, "--help"], terminal_width=80).output
    lines = shown[shown.index("Commands:") :].splitlines()[1:]
    expected = COMMANDS if not page else {words[1] for words in all_pages() if words[:1] == page}
    assert {line.split()[0] for line in lines if line.strip()} == expected
    assert not [line for line in lines if line.endswith("...")]


def test_import_registers_for_commands_and_their_ranks(tmp_path, titan, monkeypatch):
    from converters.families import registry

    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    monkeypatch.delenv("TITAN_IMPORT", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = "family_of_test_cli"
    (tmp_path / f"{module}.py").write_text(
        "from dataclasses import replace\nfrom converters.families.registry import get_family, register\n"
        "register(replace(get_family('llama3'), name='mine'))\n"
    )
    monkeypatch.chdir(tmp_path)
    try:
        code, out, _ = titan("--import", f"{module}.py", "models")
        assert code == 0 and "mine" in out
        assert os.environ["TITAN_IMPORT"] == str(tmp_path.resolve() / f"{module}.py")  # wherever a rank may start
        registry._FAMILIES.pop("mine")
        del sys.modules[module]
        assert "mine" in titan("models")[1]  # by the variable alone
    finally:
        sys.modules.pop(module, None)
        os.environ.pop("TITAN_IMPORT", None)


def test_a_failing_import_names_the_option(tmp_path, titan, monkeypatch):
    monkeypatch.delenv("TITAN_IMPORT", raising=False)
    code, _, err = titan("--import", "no.such.module", "models")
    assert code == 2 and err.startswith("error: --import no.such.module cannot be imported: ModuleNotFoundError")
