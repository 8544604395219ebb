"""The documentation: commands, options, links and TOML of the pages exist, and the site builds without warnings."""

import ast
import inspect
import json
import re
import shlex
import shutil
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from converters.api import convert
from converters.store import hub_names
from converters.store.location import locate
from scripts.bench.readme import BEGIN, END, MEASURED, PICTURE, picture
from scripts.bench.readme import table as measured_table
from scripts.docs_site import cli_reference, config_reference, on_page_markdown
from tests.unit.titan_tools.test_cli import parse_only
from titan_tools.cli import app
from trainer.config.load import by_section, load_config
from trainer.config.preset import preset_names
from trainer.config.sections import Config, Parallelism
from trainer.seed import job_of_seed, seed

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README, CONVERSION, TRAINING, INFERENCE, EXTENSION, PROBLEMS = (
    (ROOT / name).read_text()
    for name in (
        "README.md",
        "docs/conversion.md",
        "docs/training.md",
        "docs/inference.md",
        "docs/extend.md",
        "docs/problems.md",
    )
)
OPTION = r"(?<![\w-])--[a-z][a-z-]+(?![\w.-]*\.)"


EXTENSION += (ROOT / "docs" / "extend_reference.md").read_text()


def all_commands(path: tuple[str, ...] = (), group: Any = None) -> dict[tuple[str, ...], Any]:
    """Every command with its words behind `titan`."""
    group = group or typer.main.get_command(app)
    found = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= all_commands((*path, name), command) if inner else {(*path, name): command}
    return found


COMMANDS = all_commands()


def options_of(*path: str) -> set[str]:
    shown = (p for p in COMMANDS[path].params if not getattr(p, "hidden", False))
    return {name for p in shown for name in (*p.opts, *p.secondary_opts) if name.startswith("--")}


def titan_lines(text: str) -> list[list[str]]:
    """The words of every titan command in a page's blocks."""
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", text, re.S)
    joined = [block.replace("\\\n", " ") for block in blocks]
    lines = [line.removeprefix("$ ").replace(" …", "") for block in joined for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("titan ")]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TRAINING, re.S)


def test_the_readme_is_short_and_shows_every_command():
    assert len(README.splitlines()) <= 220
    assert {path[0] for path in COMMANDS} - set(re.findall(r"`(?:titan )?([a-z-]+)`", README)) == set()


def test_the_figures_of_the_readme_are_the_measured_ones():
    measured = json.loads(MEASURED.read_text())
    shown = README[README.index(BEGIN) + len(BEGIN) : README.index(END)]
    assert shown == measured_table(measured) and PICTURE.read_text() == picture(measured)
    assert measured["fp8"]["different"] == measured["greedy"]["different"] == 0


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "extend.md"], ids=lambda page: page.name)
def test_commands_of_a_page_parse(page, monkeypatch):
    monkeypatch.setattr(hub_names, "find_local", locate)  # no model of the pages is in the cache
    for words in titan_lines(page.read_text()):
        done = CliRunner().invoke(parse_only(), words[1:])
        assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}"


@pytest.mark.parametrize("page", ["from_torchtitan.md", "from_hugging_face.md"])
def test_commands_of_the_pages_for_newcomers_run(page, tmp_path, monkeypatch):
    """Those that need no torch, network or GPU, with a small model in place of each folder that they name."""
    monkeypatch.chdir(tmp_path)
    seed(job_of_seed(load_config("debug")), Path("native"))
    convert("native", hf := Path("hf"), to="hf")
    for name in ("Llama-3.1-8B", "assets/hf/Llama-3.1-8B", "qwen3-0.6b", "iter_0000100-hf", "epoch_0_step_100/model"):
        shutil.copytree(hf, name)
    foreign = "outputs/checkpoint/step-1000" if page == "from_torchtitan.md" else "checkpoint-500/pytorch_model_fsdp_0"
    for step in {"outputs/checkpoint/step-1000", foreign}:
        convert(hf, step, to="dcp")
    for name in ("titan_model.json", "titan_manifest.json"):  # torchtitan and Accelerate write neither
        Path(foreign, name).unlink()
    convert(hf, "Llama3.2-1B/original", to="meta")
    Path("run.toml").write_text('model.flavor = "debugmodel"\n')
    Path("old.toml").write_text("training.compile = true\n")
    num_run = 0
    for words in titan_lines((ROOT / "docs" / page).read_text()):
        if (
            words[1] not in ("convert", "diff", "config", "seed")
            or "Qwen3-30B-A3B-FP8" in words
            or "qwen3-bf16" in words
        ):
            continue
        if words[1:3] == ["config", "check"]:  # its file is torchtitan's, with paths of its own
            continue
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception}"
        num_run += 1
    assert num_run >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_config_keys_in_commands_of_a_page_exist(page):
    """Commands that take `--section.key VALUE` accept any option, so that their keys and values are read here."""
    for words in titan_lines(page.read_text()):
        start = next((n for n, word in enumerate(words) if re.fullmatch(r"--\w+\.[\w.]+(=.*)?", word)), None)
        if start is None:
            continue
        config = next((word for word in words[2:start] if word in preset_names()), "debug")
        keys = words[start:]
        others = {option for command in ("train", "seed", "estimate-memory") for option in options_of(command)}
        while any(key in others for key in keys):  # options of the command and their values
            place = next(n for n, key in enumerate(keys) if key in others)
            takes_value = place + 1 < len(keys) and not keys[place + 1].startswith("--")
            del keys[place : place + 1 + takes_value]
        assert load_config(config, keys).origins, shlex.join(words)


def test_options_in_the_readme_and_the_conversion_page_exist():
    known = {"--import", "--install-completion", "--help", "--json", "--version"}.union(
        *(options_of(*path) for path in COMMANDS)
    )
    for text in (README, CONVERSION):
        text = re.sub(r"^\$ tune .*$|^pip .*$|`pip [^`]*`", "", text, flags=re.M)  # other programs' commands
        assert set(re.findall(OPTION, text)) - known == set()


def test_the_conversion_page_names_every_format_and_option_of_convert():
    from converters.formats.registry import FORMATS

    assert [name for name in FORMATS if f"| `{name}` |" not in CONVERSION] == []
    paths = [path for path in COMMANDS if path[0] == "convert"]
    options = set().union(*(options_of(*path) for path in paths)) - {"--help"}
    assert {name for name in options if name not in CONVERSION} == set()


def test_the_walk_is_the_quickstart():
    walk = README[README.index("**Prepare data.**") : README.index("**With models of your own**")]
    script = (ROOT / "scripts" / "quickstart.sh").read_text()
    run = {tuple(line.split()[:2]) for line in re.findall(r"titan [a-z].*", script)}
    shown = {tuple(words[1:3]) for words in titan_lines(walk)}
    assert {words[0] for words in shown} <= {words[1] for words in run}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{page.name}: {target}"
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{page.name}: {target}"


@pytest.mark.parametrize("text", blocks("toml"), ids=lambda text: text.split("\n")[0])
def test_toml_of_the_training_page_loads(text, tmp_path):
    path = tmp_path / "page.toml"
    path.write_text(text)
    assert load_config(path).origins


def test_the_architecture_page_is_current():
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert 120 <= len(text.splitlines()) <= 190
    paths = set(re.findall(r"`((?:converters|trainer|titan_tools|tests)/[\w./]+)`", text))
    assert len(paths) > 40 and {path for path in paths if not (ROOT / path).exists()} == set()


def test_what_the_architecture_page_names_exists():
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.S)
    paths = [path for name in ("converters", "trainer", "titan_tools", "tests") for path in (ROOT / name).rglob("*.py")]
    known = set().union(
        *(re.findall(r"\w+", path.read_text()) for path in paths), *({*path.parts, path.stem} for path in paths)
    )
    named = set(re.findall(r"`([A-Za-z_]\w*)[^`/ ]*`", text))
    assert len(named) > 60 and named - known == set()


def test_scripts_named_in_pages_exist():
    for page in PAGES:
        for path in re.findall(r"(?<![\w/])scripts/[\w./]+\w", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_training_page_names_every_schedule_and_preset():
    schedules = Parallelism.__annotations__["pipeline_parallel_schedule"].__args__
    assert [name for name in schedules if f"| `{name}` |" not in TRAINING] == []
    for name in preset_names():
        family, _, size = name.partition("_")
        assert f"`{name}`" in TRAINING or (family in TRAINING and f"`_{size}`" in TRAINING), name


def test_the_page_on_inference_names_every_option_and_no_other():
    assert set(re.findall(OPTION, INFERENCE)) == options_of("infer") - {"--help"}


def message_templates() -> list[tuple[str, str]]:
    """Every text of the three packages: its longest part, and a pattern in which what is filled in matches all."""

    def literals(node: ast.AST) -> list[str | None]:  # None: filled in
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return [text for part in parts for text in literals(part)]
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return [*literals(left), *literals(right)]
        return [None]

    files = [file for name in ("converters", "trainer", "titan_tools") for file in (ROOT / name).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    found = {tuple(literals(node)) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)}
    long = [texts for texts in found if sum(len(text or "") for text in texts) >= 13]  # shorter ones match too much
    return [
        (
            max((text or "" for text in texts), key=len),
            "".join(".*" if text is None else re.escape(text) for text in texts),
        )
        for texts in long
    ]


def test_the_messages_of_the_page_on_problems_are_printed_by_titan():
    lines = [line for block in re.findall(r"```output\n(.*?)```", PROBLEMS, re.S) for line in block.splitlines()]
    messages = [line.partition(": ") for line in lines if re.match("(error|hint|WARNING): ", line)]
    assert len(messages) > 50
    templates = message_templates()
    unknown = []
    for _, _, text in messages:
        shown = re.sub(r" on rank \d+$|:$", "", text)
        starts = [
            0,
            *(m.end() for m in re.finditer(r": |^\S+ ", shown)),
        ]  # behind "command line: ", "PATH: " or "PATH "
        possible = [pattern for part, pattern in templates if part in text]
        if not any(re.fullmatch(p, end) for p in possible for n in starts for end in (shown[n:], text[n:])):
            unknown.append(text)
    assert unknown == []


def test_the_cli_reference_has_every_command_and_option():
    reference = cli_reference()
    for path, command in COMMANDS.items():
        part = reference[reference.index(f"### `titan {' '.join(path)}`\n") :]
        part = re.split("\n##+ ", part, maxsplit=1)[0]
        assert [name for name in options_of(*path) if f"`{name}" not in part] == []
        assert " ".join(command.help.split("\n\n")[0].split())[:40] in " ".join(part.replace("&lt;", "<").split())


def test_extensions_import_only_the_public_api():
    python = "\n".join(re.findall(r"```python.*?\n(.*?)```", EXTENSION, re.S))
    modules = set(re.findall(r"^\s*(?:from|import) ((?:converters|trainer|titan_tools)[\w.]*)", python, re.M))
    assert modules and modules <= {"converters.api", "trainer.api", "titan_tools.api"}


def test_what_the_code_of_the_extension_page_imports_exists():
    """And the attributes that it takes of that."""
    missing = []
    for code in re.findall(r"```python.*?\n(.*?)```", EXTENSION, re.S):
        imported = {}
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and str(node.module).endswith(".api"):
                owner = import_module(node.module)
                missing += [f"{node.module}.{each.name}" for each in node.names if not hasattr(owner, each.name)]
                imported |= {each.asname or each.name: getattr(owner, each.name, None) for each in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
                missing += [] if has_attribute(imported[node.value.id], node.attr) else [ast.unparse(node)]
    assert missing == []


def test_what_the_text_of_the_extension_page_names_exists():
    """Classes, and attributes and keywords of what an API exports."""
    apis = {name: import_module(name) for name in ("converters.api", "trainer.api", "titan_tools.api")}
    public = apis | {name: getattr(api, name) for api in apis.values() for name in api.__all__}
    public |= {"ConfigClass": public["hf_config"].ConfigClass, "nn": torch.nn}
    missing, num_named = [], 0
    text = re.sub(r"```.*?```", "", EXTENSION, flags=re.S)
    for span, name, attributes, arguments in re.findall(r"`((\w+\.api|\w+)((?:\.\w+)*)(?:\(([^`]*)\))?)`", text):
        owner = public.get(name)
        if owner is None:
            missing += [span] if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name) else []
            continue
        for attribute in attributes.split(".")[1:]:
            missing += [] if has_attribute(owner, attribute) else [span]
            owner = getattr(owner, attribute, None)
        if callable(owner):
            accepted = inspect.signature(owner).parameters
            missing += [f"{key}= of {span}" for key in re.findall(r"(\w+)=", arguments) if key not in accepted]
        num_named += 1
    assert missing == [] and num_named > 40


def has_attribute(owner: Any, name: str) -> bool:
    """Of an object; of a class also an annotated field."""
    annotated = (getattr(each, "__annotations__", {}) for each in getattr(owner, "__mro__", ()))
    return hasattr(owner, name) or any(name in each for each in annotated)


def test_the_parameters_and_roles_of_the_extension_page_are_current():
    from converters.api import Role, llama
    from converters.families.registry import get_family

    text = EXTENSION
    (code,) = re.findall(r"```python\n(from converters.api import Naming, Parameter.*?)```", text, re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    args = get_family("llama3").flavors["debug_gqa"]
    added = {p.fqn for p in names["parameters"](args)} - {p.fqn for p in llama.parameters(args)}
    assert added == {f"layers.{n}.attention_out_norm.weight" for n in range(args.num_layers)}
    table = "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    assert [role.name for role in Role if f"`{role.name}`" not in table] == []
    assert [key for key in args.__dataclass_fields__ if f"`{key}`" not in text] == []


def test_the_model_of_the_extension_page_computes():
    import torch

    from converters.families.registry import get_family

    (code,) = re.findall(r"```python\n(from torch import nn.*?)```", EXTENSION, re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    model = names["build_model"](get_family("llama3").flavors["debug_gqa"])
    assert model(torch.zeros(1, 3, dtype=torch.long)).isfinite().all()
    assert not [fqn for fqn, _ in model.named_parameters() if fqn.endswith("w3.weight")]


def test_the_cli_reference_states_defaults_and_values():
    reference = cli_reference()
    for words in (
        "One of `dcp`, `hf`, `meta`",
        "Default: 4. From 1 to 64.",
        "`-V`, `--version`",
        "Env var: TITAN_IMPORT.",
    ):
        assert words in reference
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", reference, flags=re.S)
    assert re.findall(r"--[a-z]+", prose) == []  # names of options are code, which the site does not break


def test_the_reference_of_keys_has_every_key_with_its_default_and_choices():
    reference = config_reference()
    for section, keys in by_section(Config()).items():
        part = reference[reference.index(f"## `[{section}]`\n") :].split("\n## ")[0]
        rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", part, re.M))
        assert [*rows] == [field.name for field in fields(keys)] and all(len(row) > 25 for row in rows.values())
    assert "One of Adam, AdamW." in reference
    assert re.search(r"`local_batch_size` \| `8` \| .* A whole number ≥ 1\.", reference)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config as load_site

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        build(load_site("mkdocs.yml", strict=True, site_dir=str(folder)))
    return folder


def test_the_site_builds_without_warnings(site):
    assert 'id="titan-estimate-memory"' in (site / "cli" / "index.html").read_text() and (site / "index.html").is_file()
    titles = {page.parent.name for page in site.rglob("index.html")}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} < titles


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("index.md", "[Training](docs/training.md#data)", "[Training](training.md#data)"),
        ("index.md", "![a drawing](docs/conversion.svg)", "![a drawing](conversion.svg)"),
        ("index.md", "[Security](SECURITY.md) and [pins](constraints.txt)", "[Security](security.md) and pins"),
        ("training.md", "[Changelog](../CHANGELOG.md#added)", "[Changelog](changelog.md#added)"),
        ("training.md", "[the script](../scripts/setup.sh)", "the script"),
        (
            "training.md",
            "[Layouts](#layouts) [torch](https://pytorch.org)",
            "[Layouts](#layouts) [torch](https://pytorch.org)",
        ),
    ],
)
def test_links_to_the_repository_become_links_to_pages(page, link, shown):
    place = SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={})
    assert on_page_markdown(link, page=place) == shown


def test_the_site_loads_nothing_from_another_host(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?([^\" >]+)", page.read_text())
        loaded += re.findall(
            r"<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)[^>]* href=\"?([^\" >]+)", page.read_text()
        )
        assert loaded and [each for each in loaded if re.match(r"(https?:)?//", each)] == []


def test_code_of_the_site_is_highlighted_and_drawings_are_part_of_the_page(site):
    extend, conversion = (site / name / "index.html" for name in ("extend", "conversion"))
    assert re.search(r'class="?filename"?>[\w/]+\.py<', extend.read_text()) and 'class="kn"' in extend.read_text()
    assert "<code><span>--for-mesh</span>" in conversion.read_text()
    for page, drawing in ((conversion, "conversion.svg"), (site / "architecture" / "index.html", "architecture.svg")):
        assert page.read_text().count("<svg role") == 1 and drawing not in page.read_text()


def test_the_drawings_name_what_exists():
    from converters.formats.registry import FORMATS

    drawing = (ROOT / "docs" / "architecture.svg").read_text()
    commands, *packages = re.split(r'class="head"[^>]*>(?=titan_tools|trainer|converters)', drawing)
    for part in packages:
        package = part.partition("<")[0]
        folders = {path.name for path in (ROOT / package).iterdir() if path.is_dir() and path.name[0] != "_"}
        assert set(re.findall(r'class="name"[^>]*>([^<]*)<', part)) == folders
    named = re.findall(r'class="name"[^>]*>titan ([^<]*)<', commands)
    assert set(", ".join(named).split(", ")) == {path[0] for path in COMMANDS}
    chips = re.findall(r'class="name"[^>]*>([^<]*)<', (ROOT / "docs" / "conversion.svg").read_text())
    assert sorted(chips) == sorted([*FORMATS] * 2)


def test_workflows_and_hooks_run_scripts_that_exist():
    import yaml

    for file in [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]:
        assert yaml.safe_load(file.read_text()), file
        for script in re.findall(r"run: (\S+)", file.read_text()):
            assert (ROOT / script).is_file(), f"{file.name}: {script}"
