"""Loading a config: origins and precedence, and every way of getting it wrong, reported at once and before torch."""

import inspect
import re
import sys
from dataclasses import FrozenInstanceError, field, make_dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.common.errors import ConfigError, TitanError
from converters.common.extensions import ExtensionError
from converters.common.names import SECTIONS
from trainer.config import sections
from trainer.config.load import load_config, origins
from trainer.config.preset import preset_names, write_template
from trainer.config.refused import REFUSED, REFUSED_VALUES
from trainer.config.renamed import RENAMED
from trainer.config.sections import Checkpoint, Config
from trainer.config.show import as_json, toml_text, unread
from trainer.config.toml_file import Setting

ROOT = Path(__file__).resolve().parents[4]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), overrides)
    return caught.value.message


def test_empty_file_gives_the_vocabularys_defaults(tmp_path):
    config = load_config(write(tmp_path, ""))
    assert config == Config()
    assert (config.training.steps, config.optimizer.lr, config.parallelism.data_parallel_shard_degree) == (
        10000,
        8e-4,
        -1,
    )
    assert {setting.origin for setting in origins(config).values()} == {"default"}


def test_command_line_beats_file_beats_default(tmp_path):
    path = write(tmp_path, "[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 1\n")
    config = load_config(path, ["--training.steps", "9"])
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (9, 64, 8)
    assert config.optimizer.lr == 1.0 and type(config.optimizer.lr) is float
    output = {key: setting.origin for key, setting in origins(config).items()}
    assert output["training.steps"] == "command line"
    assert output["training.seq_len"] == f"{path}:3"
    assert output["optimizer.lr"] == f"{path}:5"
    assert output["training.local_batch_size"] == "default"


def test_the_last_of_two_on_the_command_line_counts_and_the_environment_does_not(tmp_path, monkeypatch):
    for name in ("TRAINING_STEPS", "training.steps", "STEPS", "TITAN_TRAINING_STEPS"):
        monkeypatch.setenv(name, "11")
    config = load_config("debug", ["--training.steps=8", "--training.steps=9"])
    assert config.training.steps == 9
    assert load_config("debug").training.steps == 100
    assert {s.origin.split(":")[0] for s in origins(config).values()} == {"default", "preset debug", "command line"}


@pytest.mark.parametrize(
    ("words", "section", "key", "value"),
    [
        (["--training.seq-len", "64"], "training", "seq_len", 64),
        (["--training.seq_len=64"], "training", "seq_len", 64),
        (["--checkpoint.enable"], "checkpoint", "enable", True),
        (["--checkpoint.enable", "false"], "checkpoint", "enable", False),
        (["--checkpoint.enable", "--checkpoint.no_enable"], "checkpoint", "enable", False),
        (["--checkpoint.no-enable"], "checkpoint", "enable", False),
        (["--parallelism.data_parallel_shard_degree", "-1"], "parallelism", "data_parallel_shard_degree", -1),
        (["--checkpoint.exclude_from_loading", "rng"], "checkpoint", "exclude_from_loading", ("rng",)),
        (["--checkpoint.exclude-from-loading=rng, rng"], "checkpoint", "exclude_from_loading", ("rng", "rng")),
        (["--checkpoint.exclude_from_loading="], "checkpoint", "exclude_from_loading", ()),
        (["--lr_scheduler.decay_ratio", "none"], "lr_scheduler", "decay_ratio", None),
        (["--optimizer.lr", "3e-4"], "optimizer", "lr", 3e-4),
        (["--job.description=a = b"], "job", "description", "a = b"),
        (
            ["--parallelism.module_fqns_per_model_part", '[["tok_embeddings", "layers.0"], ["norm", "output"]]'],
            "parallelism",
            "module_fqns_per_model_part",
            (("tok_embeddings", "layers.0"), ("norm", "output")),
        ),
    ],
)  # fmt: skip
def test_ways_to_type_an_override(tmp_path, words, section, key, value):
    config = load_config(write(tmp_path, "[lr_scheduler]\ndecay_ratio = 0.5\n"), words)
    assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("[training]\nstepz = 5", "run.toml:2: training.stepz: no such key; did you mean `training.steps`?"),
        ("[parallelism]\ntensor_paralel_degree = 2", "did you mean `parallelism.tensor_parallel_degree`?"),
        ("[model]\nseq_len = 2", "did you mean `training.seq_len`?"),
        ("steps = 5", "run.toml:1: steps: no such key; did you mean `training.steps`?"),
        ("[checkpoint]\nenable_checkpoint = true", "is called `checkpoint.enable` now"),
        ("[training]\nsteps = -5", "run.toml:2: training.steps = -5: must be a whole number ≥ 1"),
        ("[training]\nsteps = 5.0", "must be a whole number"),
        ("[training]\nsteps = true", "must be a whole number"),
        ("[checkpoint]\nenable = 1", "must be true or false"),
        ("[optimizer]\nlr = 'abc'", "optimizer.lr = 'abc': must be a number ≥ 0"),
        ("[optimizer]\nlr = nan", "must be a number ≥ 0"),
        ("[optimizer]\nlr = inf", "must be a number ≥ 0"),
        ("[optimizer]\nbeta1 = 1.0", "≥ 0 and < 1"),
        ("[optimizer]\neps = 0.0", "must be a number > 0"),
        ("[optimizer]\nname = 'Adamw'", "must be one of Adam, AdamW"),
        ("[training]\nmixed_precision_reduce = 'float16'", "must be one of float32, bfloat16"),
        ("[training]\nglobal_batch_size = 0", "≥ 1, or -1"),
        ("[checkpoint]\nkeep_latest_k = 1", "not 1"),
        ("[checkpoint]\nexclude_from_loading = ['optimiser']", "a list, each item one of optimizer"),
        ("[checkpoint]\nexclude_from_loading = 'optimizer'", "a list"),
        ("[activation_checkpoint]\nselective_ac_option = '0'", "every n-th layer"),
        ("[parallelism]\npipeline_parallel_schedule = 'DualPipeV'", "overlaps two microbatches' exchanges"),
        (
            "[activation_checkpoint]\nper_op_sac_force_recompute_mm_shapes_by_fqns = ['attention.wo']",
            "which products `op` recomputes cannot be chosen",
        ),
        ("[model]\nconverters = ['mx']", "model.converters = ['mx']: is called `quantize.linear.mx` now"),
        ("[model]\nconverters = ['quantize.linear.mx']", "MXFP8 is not covered"),
        ("[model]\nconverters = ['quantize.grouped_mm.float8']", "float8 of grouped products is a prototype"),
        ("[model]\nconverters = ['float9']", "a list, each item quantize.linear.float8"),
        ("[parallelism]\nenable_compiled_autograd = false", "no such key any more: compiled autograd was removed"),
        ("[comm]\nmode = 'fake_backend'", "run `titan train CONFIG --dry-run`"),
        ("[model]\nname = 'flux'", "it makes images"),
        ("[metrics]\nenable_wandb = 'yes'", "must be true or false"),
        ("[model]\nflavor = '9B'", "run.toml:2: model.flavor = '9B': must be one of debugmodel"),
        ("[model]\nname = 'gpt2'", "must be one of llama3"),
    ],
)
def test_one_wrong_thing_is_named_with_its_place(tmp_path, text, output):
    message = refusal(tmp_path, text)
    assert output in message and message.count("\n") == 0


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--stepz", "5"], "--stepz: no such key; did you mean `training.steps`?"),
        (["--training.stepz=5"], "did you mean `training.steps`?"),
        (["--checkpiont.interval", "5"], "did you mean `checkpoint.interval`?"),
        (["--quantize.linear.float8.filter_fqn", "a"], "did you mean `quantize.linear.float8.filter_fqns`?"),
        (["--training.steps"], "--training.steps needs a value"),
        (["--training.steps", "abc"], "command line: training.steps = 'abc': must be a whole number"),
        (["--checkpoint.enable=maybe"], "must be true or false"),
        (["--optimizer.lr=inf"], "command line: optimizer.lr = inf: must be a number ≥ 0"),
        (["--training.steps", "1.5"], "must be a whole number ≥ 1"),
        (["--lr_scheduler.decay_type", "linaer"], "one of linear, sqrt, cosine"),
        (["--lr_scheduler.decay_ratio", "1.5"], "a number ≥ 0 and ≤ 1"),
        (["--checkpoint.async_mode", "thread"], "one of disabled, async, async_with_pinned_mem"),
        (["--parallelism.data_parallel_shard_degree", "0"], "a whole number ≥ 1, or -1"),
        (["--compile.components", "model,los"], "a list, each item one of model, loss"),
        (["--quantize.linear.float8.recipe_name", "col"], "one of tensorwise, rowwise, rowwise_with_gw_hp"),
        (["--debug.seed", "-1"], "a whole number ≥ 0 and ≤ 9,223,372,036,854,775,807"),
        (["5"], "'5' is not an option"),
        (["--training.no_steps"], "no such key"),
        (["--fit"], "--fit: no such option, and no such key: keys are `--section.key`"),
        (["--compile"], "--compile: that is a section; its keys: compile.enable, "),
        (["--tp", "2"], "did you mean `parallelism.tensor_parallel_degree`?"),
        (["--model.n_layers", "3"], "a model's numbers come from its flavor"),
        (["--model.hidden_size=3"], "a model's numbers come from its flavor"),
        (["--model.flavour=8B"], "did you mean `model.flavor`?"),
        (["--parallelism.module_fqns_per_model_part", "[[1"], "must be a list"),
    ],
)
def test_wrong_overrides(tmp_path, words, output):
    assert output in refusal(tmp_path, "", *words)


def test_all_problems_are_reported_at_once(tmp_path):
    text = "[training]\nsteps = -1\nstepz = 3\n[memory_estimation]\nenable = true\n[optimizer]\nlr = nan\n"
    text += "[model]\nflavor = '9B'\n"
    lines = refusal(tmp_path, text, "--checkpoint.interval", "0").split("\n")
    assert lines[0].endswith("6 problems")
    for place, line in zip((":2:", ":3:", ":5:", ":7:", "command line:", ":9:"), lines[1:], strict=True):
        assert place in line


@pytest.mark.parametrize(
    ("data", "output"),
    [
        (b"[training]\nsteps = = 3\n", "run.toml:2:9: "),
        (b"[training]\nsteps = 3\n[training]\n", "run.toml:3:"),
        (b"[training]\nsteps = [1,\n", "run.toml:3"),
        (b"[training\nsteps = 3\n", "run.toml:1:10: "),
        (b"training:\n  steps: 3\n", "run.toml:1:"),
        (b'{"training": {"steps": 3}}', "run.toml:1:"),
        (b"\x80\x04\x95cos\nsystem\n", "is not UTF-8"),
        (b"[training]\nsteps = 3\nx = '\xff'\n", "run.toml:3: byte 26 is not UTF-8"),
        ("[training]\nsteps = 3\n".encode("utf-16"), "it looks like UTF-16"),
        (b"# " + b"x" * (1 << 20), "larger than"),
        (b"x = " + b"[" * 100_000, "nested too deeply"),
    ],
    ids=[
        *("syntax", "duplicate table", "open at the end", "open header", "yaml", "json", "pickle"),
        *("latin-1", "utf-16", "huge", "deep"),
    ],
)
def test_files_that_are_no_toml(tmp_path, data, output):
    path = tmp_path / "run.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="run.toml") as caught:
        load_config(path)
    assert output in caught.value.message + caught.value.hint


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n")
    assert load_config(path).training.steps == 3


def test_missing_files_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such config file") as caught:
        load_config("debugg")
    assert "llama3_8b" in caught.value.hint and caught.value.tries == ("titan config show debug",)
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="comes before the overrides"):
        load_config("--training.steps")


def test_lines_are_found_in_every_way_of_writing_a_key(tmp_path):
    text = 'training.steps = 1\nvalidation = { freq = 3 }\n["optimizer"]\n"lr" = 1e-3\n'
    config = load_config(write(tmp_path, text))
    assert [config.origins[key][-2:] for key in ("training.steps", "validation.freq", "optimizer.lr")] == [
        ":1",
        ":2",
        ":4",
    ]


def test_keys_without_effect_are_taken_only_with_harmless_values_and_reported(tmp_path):
    text = '[quantize.linear.mx]\nfilter_fqns = ["output"]\n[memory_estimation]\nenable = false\n'
    output = unread(load_config(write(tmp_path, text)))
    assert len(output) == 2 and "model.converters" in output[0] and "run.toml:2" in output[0]


def test_an_older_file_is_reported_how_to_be_upgraded(tmp_path):
    path = write(tmp_path, "[training]\ncompile = true\n")
    with pytest.raises(ConfigError, match="is called `compile.enable` now") as caught:
        load_config(path)
    assert caught.value.tries == (f"titan config upgrade {path}",)
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "[training]\nsteppes = 3\n"))
    assert caught.value.tries == ()


def test_no_key_is_both_read_and_refused():
    read = set(origins(Config()))
    assert not read & set(REFUSED)
    assert {key for key, _ in REFUSED_VALUES} <= read
    assert set(RENAMED.values()) <= read | set(REFUSED)


def test_every_key_is_read_by_something_outside_of_the_config():
    """A key that is taken and read by nothing would be a lie; it belongs in refused.py."""
    sources = [path for package in ("trainer", "titan_tools") for path in (ROOT / package).rglob("*.py")]
    code = "\n".join(path.read_text("utf-8") for path in sources if "config" not in path.parts)
    code += inspect.getsource(Config.described)
    assert [key for key in origins(Config()) if not re.search(rf"\.{key.split('.')[1]}\b", code)] == []


def test_sections_that_can_be_left_out_are_those_of_a_checkpoint(tmp_path):
    assert load_config(
        write(tmp_path, f"[checkpoint]\nexclude_from_loading = {list(SECTIONS)}")
    ).checkpoint == Checkpoint(exclude_from_loading=SECTIONS)


@pytest.mark.parametrize("name", preset_names())
def test_presets_load(name):
    config = load_config(name)
    assert config.training.dataset == "tokens" and config.checkpoint.enable
    assert config.origins["training.steps"].startswith(f"preset {name}:")


def test_a_file_of_that_name_goes_before_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3_8b").mkdir()  # a folder does not
    Path("debug").write_text("[training]\nsteps = 3\n")
    assert load_config("debug").training.steps == 3
    assert load_config("llama3_8b").model.flavor == "8B"


def test_a_written_preset_loads_and_is_never_written_over(tmp_path):
    out = tmp_path / "mine.toml"
    write_template("debug", out)
    assert load_config(out) == load_config("debug")
    with pytest.raises(ConfigError, match="exists already"):
        write_template("debug", out)
    with pytest.raises(ConfigError, match="there is no preset"):
        write_template("debugg", tmp_path / "other.toml")
    with pytest.raises(ConfigError, match="No such file"):
        write_template("debug", tmp_path / "nowhere" / "mine.toml")


def test_shown_values_are_toml_and_lead_back_to_the_same_config(tmp_path):
    config = load_config("debug", ["--parallelism.module_fqns_per_model_part", '[["a"], ["b", "c"]]'])
    lines = [f"{key} = {toml_text(s.value)}" for key, s in origins(config).items() if s.value is not None]
    assert load_config(write(tmp_path, "\n".join(lines))) == config
    assert as_json(config)["config"]["training"]["steps"] == config.training.steps
    assert as_json(config)["origins"]["parallelism.module_fqns_per_model_part"] == "command line"


def test_a_config_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        load_config("debug").training.steps = 3


def test_custom_import_registers_what_the_config_names(tmp_path):
    package = tmp_path / "my_family_of_test_config_load"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from dataclasses import replace\nfrom converters.families import registry\n"
        "registry._FAMILIES['mine'] = replace(registry.get_family('llama3'), name='mine')\n"
    )
    from converters.families import registry

    try:
        text = f'[experimental]\ncustom_import = "{package}"\n[model]\nname = "mine"\nflavor = "8B"\n'
        assert load_config(write(tmp_path, text)).model.name == "mine"
    finally:
        registry._FAMILIES.pop("mine", None)


@pytest.mark.parametrize(
    "name, kind",
    [("no.such.module", ConfigError), ("./no_such_folder", ConfigError), ("{tmp}/broken.py", ExtensionError)],
)
def test_custom_import_that_fails_is_reported(tmp_path, name, kind):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(kind, match="custom_import"):
        load_config(write(tmp_path, f'[experimental]\ncustom_import = "{name.format(tmp=tmp_path)}"\n'))


@settings(deadline=None)  # a busy machine is no fault
@given(
    st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
)
def test_only_titan_errors_leave_whatever_the_file_holds(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(data)
    try:
        config = load_config(path)
    except TitanError as error:
        assert error.message
    else:
        assert isinstance(config, Config)


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.text(max_size=30) | st.sampled_from(["--training.steps", "--checkpoint.enable", "5", "-1", "["])))
def test_only_titan_errors_leave_whatever_is_typed(words):
    try:
        assert isinstance(load_config("debug", words), Config)
    except TitanError as error:
        assert error.message


def test_a_limit_is_reported_to_the_last_digit():
    with pytest.raises(ConfigError, match="≤ 134,217,728"):
        load_config("debug", ["--training.seq_len", str(2**27 + 1)])


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that registers a section, which is forgotten again."""
    monkeypatch.setattr(sections, "registered_sections", {})
    monkeypatch.setattr("trainer.config.load.registered_sections", sections.registered_sections)
    path = tmp_path / f"with_a_section_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom typing import Annotated\n"
        "from trainer.api import register_section\nfrom trainer.config.types import Number\n"
        "@dataclass(frozen=True, slots=True, kw_only=True)\nclass Images:\n"
        "    size: Annotated[int, Number(low=1)] = 8\n    flip: bool = False\n"
        "register_section('images', Images)\n"
    )
    sections.kinds.cache_clear()
    yield path
    sections.kinds.cache_clear()


def test_a_registered_section_is_read_checked_and_shown_as_a_built_in_one(module, tmp_path):
    path = write(tmp_path, f'[experimental]\ncustom_import = "{module}"\n[images]\nsize = 32\n')
    config = load_config(path, ["--images.flip"])
    images = config.section(sections.registered_sections["images"])
    assert (images.size, images.flip) == (32, True)
    assert origins(config)["images.size"] == Setting(32, f"{path}:4")
    assert as_json(config)["config"]["images"] == {"size": 32, "flip": True}
    assert load_config(path, ["--images.no_flip", "--images.size=64"]).registered["images"].size == 64
    defaults = load_config(write(tmp_path, f'[experimental]\ncustom_import = "{module}"\n'))
    assert origins(defaults)["images.size"] == Setting(8, "default")
    with pytest.raises(ConfigError, match=r"images.size = 0: must be a whole number ≥ 1"):
        load_config(path, ["--images.size", "0"])
    with pytest.raises(ConfigError, match=r"images.sise: no such key; did you mean `images.size`\?"):
        load_config(path, ["--images.sise", "0"])


def test_without_the_module_its_section_is_unknown(module, tmp_path):
    assert "images.size: no such key" in refusal(tmp_path, "[images]\nsize = 32\n")
    # with another problem the module is not imported, and may have had the section
    text = f'[experimental]\ncustom_import = "{module}"\n[images]\nsize = 32\n[training]\nsteps = 0\n'
    assert "images" not in refusal(tmp_path, text) and module.stem not in sys.modules


@pytest.mark.parametrize(
    ("name", "record", "text"),
    [
        ("training", "Good", "is built in"),
        ("Images", "Good", "'Images' cannot be the name of a section"),
        ("images", "Good()", "which is not a dataclass"),
        ("images", "WithoutDefault", "needs a default"),
        ("images", "OtherDefault", "of its type"),
        ("images", "OtherType", "needs a default that is of its type"),
    ],
)
def test_a_section_that_cannot_be_read_is_refused_when_it_is_registered(module, name, record, text):
    records = {
        "Good": make_dataclass("Good", [("size", int, 8)], frozen=True),
        "WithoutDefault": make_dataclass("WithoutDefault", [("size", int)], frozen=True),
        "OtherDefault": make_dataclass("OtherDefault", [("size", int, "8")], frozen=True),
        "OtherType": make_dataclass("OtherType", [("size", dict, field(default_factory=dict))], frozen=True),
    }
    with pytest.raises(ExtensionError, match=text):
        sections.register_section(name, eval(record, records))
