"""The house rules that a machine can check: import arrows, light start, packages named in pyproject."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from converters.containers.registry import CONTAINERS
from converters.families.registry import all_families

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "converters": {"converters"},
    "trainer": {"trainer", "converters"},
    "titan_tools": {"titan_tools", "trainer", "converters"},
}
OURS = set(MAY_IMPORT)
# The packages in converters, each with those that it may import. Next to them are only what callers open: the doors.
BELOW = {
    "common": set(),
    "store": {"common"},
    "views": {"common", "store"},
    "families": {"common", "views"},
    "tokenizers": {"common", "store"},
    "quantized": {"common", "families", "views"},
    "model": {"common", "families", "quantized", "store", "tokenizers", "views"},
    "naming": {"common", "families", "model", "quantized", "views"},
    "containers": {"common", "families", "naming", "store", "views"},
    "engine": {"common", "containers", "store", "views"},
    "layout": {"common", "containers", "families", "views"},
    "source": {
        "common",
        "containers",
        "engine",
        "families",
        "model",
        "naming",
        "quantized",
        "store",
        "tokenizers",
        "views",
    },
    "integrity": {
        "common",
        "containers",
        "engine",
        "families",
        "model",
        "naming",
        "quantized",
        "source",
        "store",
        "views",
    },
    "torchtune": {"common", "families", "model", "store", "tokenizers"},
    "training": {
        "common",
        "containers",
        "engine",
        "families",
        "layout",
        "model",
        "naming",
        "quantized",
        "source",
        "views",
        "store",
    },
    "formats": {
        *(
            "common",
            "containers",
            "families",
            "layout",
            "model",
            "naming",
            "quantized",
            "store",
            "tokenizers",
            "torchtune",
        ),
        "views",
    },
    "conversion": {
        *(
            "common",
            "containers",
            "engine",
            "families",
            "formats",
            "integrity",
            "model",
            "naming",
            "quantized",
            "source",
        ),
        *("store", "tokenizers", "views"),
    },
}
# Calls by which a module of converters opens, lists, looks at or changes files itself; only the store package may
FILE_METHODS = {
    *("chmod", "exists", "expanduser", "glob", "hardlink_to", "is_dir", "is_file", "is_mount", "is_symlink", "iterdir"),
    *("lstat", "mkdir", "open", "read_bytes", "read_text", "readlink", "rename", "resolve", "rglob", "rmdir", "stat"),
    *("samefile", "symlink_to", "touch", "unlink", "write_bytes", "write_text", "fromfile", "tofile", "memmap"),
    *("copy_file_range", "sync_file_range"),
}
CONTAINER_MARKS = re.compile(r"distcp|safetensors|pytorch_model|consolidated|\.pth\b")  # which the store is given
FILE_MODULES = {"fcntl", "filecmp", "glob", "mmap", "shutil", "tempfile"}
FILE_FUNCTIONS = {"builtins.open", "io.open", "io.FileIO", "numpy.fromfile", "numpy.memmap", "numpy.load"} | {
    f"pathlib.Path.{name}" for name in FILE_METHODS
}
NOT_OF_FILES = {
    "PathLike",
    "fspath",
    "fsencode",
    "strerror",
    "getpid",
    "cpu_count",
    "sched_getaffinity",
    "environ",
}  # of os
# No file of a checkpoint: methods of a saver, the code that it runs, memory that processes share, a pattern
OPEN_OTHER_THINGS = {
    ("converters/torchtune/recipe", "recipe_text"),
    *(("trainer/checkpoints/background", f"AsynchronousSaver.{name}") for name in ("open", "save")),
    ("trainer/checkpoints/background", "ProcessWriter.open"),
    ("trainer/checkpoints/checkpoints", "Checkpoints.get_ready"),
    *(("trainer/checkpoints/staging", f"SharedMemory.{name}") for name in ("__init__", "get", "close")),
}
DOORS = {"api", "convert", "diff", "inspect", "reshard", "verify"}
# What each package of inference may import of the others and of the modules next to them
INFER_BELOW = {
    "text": set(),
    "model": {"ranks"},
    "decoding": {"text", "model"},
    "tasks": {"text", "decoding", "ranks", "report", "request", "task"},
}
# The same of the memory estimate
MEMORY_BELOW = {
    "trace": set(),
    "expand": {"trace"},
    "replay": {"trace"},
}
# What works on a trace once it is made: quick, and without torch
MEMORY_WITHOUT_TORCH = ("expand.layers", "replay.replay")


# All of trainer/ knows an objective by its record, a batch by its units and a model by its own, but for these
OF_NEXT_TOKEN = (
    *("next_token/*", "data/*", "loss/*", "models/*"),  # models: decoders, and the registry of losses' functions
    *("config/*", "objective.py", "api.py"),  # keys of the config; how an objective and a loss are written
    "job/chosen_model.py",  # the tokenizer of checkpoints
    *("observability/sinks.py", "observability/tags.py"),  # names of metrics, torchtitan's
    *("parallel/document_*", "parallel/masked_attention.py", "parallel/gpu_attention.py", "parallel/context.py"),
    *("parallel/attention_backend.py", "parallel/embedding.py", "parallel/float8.py", "parallel/latents.py"),
    *("parallel/expert_*", "parallel/tensor.py", "optim/expert_balance.py"),  # parallelism of decoders' modules
)
# Words with another meaning: the target of a copy, token ids of config.json, a file that all ranks see
OTHER_MEANINGS = {
    "checkpoints/checkpoints.py": {"token"},
    "checkpoints/export_plan.py": {"target"},
    "checkpoints/io.py": {"target"},
    "checkpoints/load.py": {"target", "token"},
    "checkpoints/shared_folder.py": {"token"},
    "job/hardware.py": {"document"},  # attention with masks, whose kernels a machine may lack
    "seed.py": {"target"},
}
ALSO_IN_THE_LOOP = ("titan_tools/memory/trace/capture.py",)
OF_AN_OBJECTIVE = re.compile(  # `target=` is an argument of torch's
    r"(?<![a-z])(tokens?|targets?(?!=)|documents?|vocab|vocabulary|perplexity|seq_len|next_token)(?![a-z])", re.I
)


def imported_names(file: Path) -> set[str]:
    """Dotted names of all that a file imports, inside of functions and for types, too."""
    names, tree = set(), ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_roots(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_names(file)}


@pytest.mark.parametrize("package", sorted(OURS))
def test_imports_point_one_way(package):
    wrong = {
        str(file.relative_to(ROOT)): sorted((imported_roots(file) & OURS) - MAY_IMPORT[package])
        for file in (ROOT / package).rglob("*.py")
    }
    assert {file: roots for file, roots in wrong.items() if roots} == {}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_module_imports_itself_through_others():
    files = {module_name(file): file for package in OURS for file in (ROOT / package).rglob("*.py")}

    def module_of(name: str) -> str | None:
        return next((each for each in (name, name.rpartition(".")[0]) if each in files), None)

    imports = {module: {module_of(name) for name in imported_names(file)} - {None} for module, file in files.items()}
    while without := {module for module, used in imports.items() if not used & imports.keys()}:
        imports = {module: used for module, used in imports.items() if module not in without}
    in_circles = {module: sorted(used & imports.keys()) for module, used in imports.items()}
    while unused := in_circles.keys() - {name for used in in_circles.values() for name in used}:
        in_circles = {module: used for module, used in in_circles.items() if module not in unused}
    assert in_circles == {}


def test_the_root_of_converters_holds_doors():
    assert {file.stem for file in (ROOT / "converters").glob("*.py")} == DOORS | {"__init__"}


def test_packages_in_converters_point_one_way():
    assert {file.parent.name for file in (ROOT / "converters").glob("*/__init__.py")} == set(BELOW)
    wrong = {}
    for package, below in BELOW.items():
        for file in (ROOT / "converters" / package).glob("*.py"):
            used = {name.split(".")[1] for name in imported_names(file) if name.startswith("converters.")}
            wrong[file.name] = sorted((used & set(BELOW)) - below - {package})
    assert {file: packages for file, packages in wrong.items() if packages} == {}


@pytest.mark.parametrize(
    ("folder", "all_below"),
    [("infer", INFER_BELOW), ("memory", MEMORY_BELOW)],
)
def test_packages_of_a_tool_point_one_way(folder, all_below):
    path = ROOT / "titan_tools" / folder
    assert {file.parent.name for file in path.glob("*/__init__.py")} == set(all_below)
    parent = ("titan_tools", *folder.split("/"))
    wrong = {}
    for package, below in all_below.items():
        for file in (path / package).rglob("*.py"):
            names = [name.split(".") for name in imported_names(file)]
            used = {name[len(parent)] for name in names if tuple(name[: len(parent)]) == parent}
            wrong[str(file.relative_to(path))] = sorted(used - below - {package})
    assert {file: packages for file, packages in wrong.items() if packages} == {}


def file_calls(code: str) -> list[tuple[str, str]]:
    """(function, reference) of all by which code opens, lists, looks at or changes files, under any imported name."""
    tree, imported = ast.parse(code), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {each.asname or each.name.split(".")[0]: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    references = []

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Name | ast.Attribute):
                text = ast.unparse(child)
                first, dot, rest = text.partition(".")
                name = imported.get(first, f"builtins.{first}" if first == "open" else first) + dot + rest
                module, _, member = name.rpartition(".")
                is_of_module = module in FILE_MODULES or (module == "os" and member not in NOT_OF_FILES)
                is_method = isinstance(child, ast.Attribute) and first not in imported and member in FILE_METHODS
                if is_of_module or is_method or name in FILE_FUNCTIONS:
                    references.append((function, text))
            inside = child.name if isinstance(child, ast.FunctionDef | ast.ClassDef) else ""
            visit(child, f"{function}.{inside}".strip(".") if inside else function)

    visit(tree, "")
    return references


@pytest.mark.parametrize(
    "code",
    [
        *("open(p)", "from os import stat\nstat(p)", "import os as o\no.listdir(p)", "g = p.read_text\ng()"),
        *("import filecmp\nfilecmp.cmp(p, q)", "from pathlib import Path\nmap(Path.read_bytes, ps)"),
        *("import io\nio.open(p)", "import numpy as np\nnp.fromfile(p)", "from mmap import mmap\nmmap(f, 0)"),
        "class A:\n    def f(self):\n        return [p.stat() for p in self.paths]",
    ],
)
def test_a_file_call_is_seen_in_any_form(code):
    assert file_calls(code)


def test_only_the_store_package_opens_files():
    files = [file for folder in ("converters", "trainer/checkpoints") for file in (ROOT / folder).rglob("*.py")]
    names = {file.relative_to(ROOT).with_suffix("").as_posix(): file for file in files}
    calls = {
        (name, function, text)
        for name, file in names.items()
        if not name.startswith("converters/store/")
        for function, text in file_calls(file.read_text())
    }
    assert {call for call in calls if call[:2] not in OPEN_OTHER_THINGS} == set()
    assert {call[:2] for call in calls} >= OPEN_OTHER_THINGS


def comparisons(file: Path) -> Iterator[tuple[str, set[str]]]:
    """Comparisons in a file, and patterns of a match, with the strings that they compare with."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare | ast.MatchValue):
            strings = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            yield f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}", strings


def test_nothing_depends_on_the_name_of_a_family():
    own_files = ("converters/families", "trainer/models")
    others_names = (
        "titan_tools/pages/inspect.py",  # which models have Llama 2's form of Meta's files, but are none of its sizes
        "converters/torchtune/recipe.py",  # a part of the path of torchtune's tokenizer
    )
    files = [f for package in OURS for f in (ROOT / package).rglob("*.py")]
    others = [f for f in files if not any(f.is_relative_to(ROOT / folder) for folder in own_files)]
    names = {*all_families()}
    compared = [text for file in others for text, strings in comparisons(file) if strings & names]
    assert {text.partition(":")[0] for text in compared} == {*others_names}, compared
    assert len(compared) == len(others_names)


# Straight lists of fields: the options of a command, and a recipe
LONG = {"convert", "reshard", "recipe_text"}
MANY_ARGUMENTS = {"convert", "reshard"}


def test_functions_of_converters_are_short_and_have_few_arguments():
    long, wide = {}, {}
    for file in (ROOT / "converters").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                name = f"{file.relative_to(ROOT)}: {node.name}"
                if node.end_lineno - node.lineno + 1 > 60 and node.name not in LONG:
                    long[name] = node.end_lineno - node.lineno + 1
                if (
                    len(arguments) - (arguments[:1] != [] and arguments[0].arg in ("self", "cls")) > 8
                    and node.name not in MANY_ARGUMENTS
                ):
                    wide[name] = len(arguments)
    assert (long, wide) == ({}, {})


def test_nothing_depends_on_the_name_of_a_container():
    others = [f for p in OURS for f in (ROOT / p).rglob("*.py") if not f.is_relative_to(ROOT / "converters/containers")]
    compared = [text for file in others for text, strings in comparisons(file) if strings & {*CONTAINERS}]
    assert [text for text in compared if "container" in text] == []


def test_converters_never_import_torch():
    guilty = [str(f.relative_to(ROOT)) for f in (ROOT / "converters").rglob("*.py") if "torch" in imported_roots(f)]
    assert guilty == []


def test_only_an_objectives_modules_have_its_words():
    files = {file.relative_to(ROOT / "trainer").as_posix(): file for file in (ROOT / "trainer").rglob("*.py")}
    wrong = []
    for name, file in (files | {name: ROOT / name for name in ALSO_IN_THE_LOOP}).items():
        if any(fnmatch(name, pattern) for pattern in OF_NEXT_TOKEN):
            continue
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            words = {word.lower().removesuffix("s") for word in OF_AN_OBJECTIVE.findall(line)}
            if words - OTHER_MEANINGS.get(name, set()):
                wrong.append(f"{name}:{number}: {line.strip()}")
    assert wrong == []


def test_only_models_have_layers():
    files = [*(ROOT / "trainer").rglob("*.py"), *(ROOT / "titan_tools" / "memory").rglob("*.py")]
    guilty = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files
        if file.parent != ROOT / "trainer" / "models"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "layers" and ast.unparse(node.value) != "self"
    ]
    assert guilty == []


def test_init_files_hold_no_code():
    for package in OURS:
        for file in (ROOT / package).rglob("__init__.py"):
            body = ast.parse(file.read_text()).body
            assert all(isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in body), file


def test_docstrings_have_their_nouns_and_say_if():
    """`Number of rows of one block`, not `Of a block`; an error is raised *if* something is wrong, not *where*."""
    guilty = []
    for file in (file for package in OURS for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                continue
            text = " ".join((ast.get_docstring(node) or "").split())
            has_no_noun = re.match(r"(As|Its|Of|Those)\b", text)
            if has_no_noun or re.search(r"\b(Raises? \w+(, [^,.]*,)?|None|False|\"\"|0) where\b", text):
                guilty.append(f"{file.relative_to(ROOT)}: {text:.100}")
    assert guilty == []


def test_long_functions_name_their_variables_with_nouns():
    pronouns = {"found", "made", "held", "kept", "given", "own", "its", "theirs", "one", "others"}
    guilty = []
    for file in (file for package in OURS for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 30:
                names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and name.id in pronouns}
                guilty += [f"{file.relative_to(ROOT)}: {node.name}: {name}" for name in names]
    assert guilty == []


def test_every_package_is_named_in_pyproject():
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for package in OURS
        for file in (ROOT / package).rglob("__init__.py")
    }
    assert named - {"trainer.config.presets"} == found - {"trainer.config.presets"}


def test_pytest_and_ruff_pass_over_no_folder_of_tests(pytestconfig):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    folders = {part for file in (ROOT / "tests").rglob("test_*.py") for part in file.relative_to(ROOT).parent.parts}
    assert {"dist", "gpu"} <= folders
    for patterns in (pytestconfig.getini("norecursedirs"), settings["ruff"]["exclude"]):
        assert [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in patterns)] == []


def modules_loaded_by(*arguments: str) -> set[str]:
    code = (
        "import sys; sys.argv = ['titan', *sys.argv[1:]]\n"
        "from titan_tools.cli import run\nrun()\nprint(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return {name.split(".")[0] for name in done.stderr.split()}


def test_help_loads_neither_torch_nor_numpy_nor_the_hubs_client():
    assert modules_loaded_by("--help") & {"torch", "numpy", "huggingface_hub"} == set()


def test_only_download_and_names_on_the_hub_load_the_hubs_client():
    hub = {*(ROOT / "titan_tools" / "hub").glob("*.py"), ROOT / "converters" / "store" / "hub_names.py"}
    users = {f for package in OURS for f in (ROOT / package).rglob("*.py") if "huggingface_hub" in imported_roots(f)}
    assert users and users <= hub


def test_models_loads_no_torch():
    assert "torch" not in modules_loaded_by("models")


def test_traces_are_expanded_and_replayed_without_torch():
    wanted = ", ".join(f"titan_tools.memory.{name}" for name in MEMORY_WITHOUT_TORCH)
    code = f"import sys, {wanted}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
