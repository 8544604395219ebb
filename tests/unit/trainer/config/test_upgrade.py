"""Upgrading a config: every rename, what cannot be translated, and that nothing else moves."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from converters.common.errors import ConfigError, TitanError
from trainer.config.load import load_config, origins
from trainer.config.preset import find_preset, preset_names
from trainer.config.refused import REFUSED
from trainer.config.renamed import CHANGED_DEFAULTS, GONE, RENAMED, RENAMED_VALUES
from trainer.config.sections import Config
from trainer.config.toml_lines import flatten, read_lines
from trainer.config.upgrade import upgrade, write_upgraded

CONFIGS = Path(__file__).parent / "configs"
TODAY = sorted(path for path in CONFIGS.glob("*.toml") if path.stem != "llama3_405b")  # with a converter's old name


def of(folder: Path, text: str):
    path = folder / "old.toml"
    path.write_text(text)
    return upgrade(path)


def values(text: str) -> dict:
    return flatten(tomllib.loads(text))


@pytest.mark.parametrize("path", TODAY + [find_preset(name) for name in preset_names()], ids=lambda path: path.stem)
def test_a_file_of_today_stays_as_it_is(path):
    found = upgrade(path)
    assert (found.changes, found.problems, found.notes) == ([], [], [])
    assert found.data == path.read_bytes() and found.text == path.read_text()


def test_the_article_of_2024(tmp_path):
    found = upgrade(CONFIGS / "older" / "aws_blog_2024.toml")
    assert found.problems == found.refused == []
    out = tmp_path / "new.toml"
    write_upgraded(found, out, replace=False)
    config = load_config(out)
    assert (config.training.local_batch_size, config.lr_scheduler.warmup_steps) == (1, 200)
    assert config.compile.enable and config.model.converters == ("quantize.linear.float8",)
    assert config.float8.enable_fsdp_float8_all_gather and config.float8.precompute_float8_dynamic_scale_for_fsdp
    assert config.optimizer.implementation == "fused" and config.checkpoint.enable
    assert config.model.hf_assets_path == "./torchtitan/datasets/tokenizer/original"
    assert not config.metrics.save_for_all_ranks and not config.checkpoint.last_save_model_only
    assert config.parallelism.data_parallel_shard_degree == -1
    assert "warmup_steps = 200  # the schedule's\n" in found.text  # moved with its comment
    assert "max_norm = 1.0      # of all gradients\n" in found.text  # untouched
    assert "[experimental]" not in found.text  # it has lost all that it held
    assert upgrade(out).changes == []


def test_release_0_1_0(tmp_path):
    found = upgrade(CONFIGS / "older" / "release_0_1_0.toml")
    assert found.problems == found.refused == []
    new = values(found.text)
    assert new["parallelism.module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
        ["layers.3", "layers.4", "layers.5", "norm", "output"],
    ]
    assert new["model.hf_assets_path"] == "./tests/assets"
    assert (new["debug.seed"], new["debug.deterministic"], new["lr_scheduler.min_lr_factor"]) == (42, True, 0.1)
    assert new["quantize.linear.float8.filter_fqns"] == ["output"] and "[float8]" not in found.text
    assert "fault_tolerance.sync_steps" not in new and "fault_tolerance.enable" in new
    output = "\n".join(found.changes)
    assert ":30: parallelism.pipeline_parallel_split_points" in output  # with its line
    assert "compiled autograd was removed in 0.2.1" in output
    write_upgraded(found, tmp_path / "new.toml", replace=False)
    assert load_config(tmp_path / "new.toml").origins["debug.seed"].startswith(str(tmp_path))


def test_release_0_2_0_and_changed_defaults_are_reported():
    found = upgrade(CONFIGS / "older" / "release_0_2_0.toml")
    assert "seed = 1                # for the weights\n" in found.text and len(found.changes) == 3
    assert [note.split(" ")[0] for note in found.notes] == list(CHANGED_DEFAULTS)


def test_the_converters_name_in_the_shipped_405b(tmp_path):
    found = upgrade(CONFIGS / "llama3_405b.toml")
    assert len(found.changes) == 1 and not found.problems
    path = tmp_path / "405b.toml"
    write_upgraded(found, path, replace=False)
    assert load_config(path).model.converters == ("quantize.linear.float8",)
    before, after = (CONFIGS / "llama3_405b.toml").read_text().splitlines(), found.text.splitlines()
    assert [new for old, new in zip(before, after, strict=True) if old != new] == [
        'converters = ["quantize.linear.float8"]'
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[optimizer]\nfused = false", {"optimizer.implementation": "foreach"}),
        ("[metrics]\nrank_0_only = false", {"metrics.save_for_all_ranks": True}),
        ("[metrics]\nenable_color_printing = true", {"metrics.disable_color_printing": False}),
        ("[training]\nenable_float8_linear = false", {}),
        (
            "[mx]\nuse_fp8_dim1_cast_triton_kernel = false",
            {"quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": "torch"},
        ),
        ('[training]\ndataset = "c4_mini"', {"training.dataset": "c4_test"}),
        ('[float8]\nrecipe_name = "all_axiswise"', {"quantize.linear.float8.recipe_name": "rowwise"}),
        (
            '[model]\nconverters = ["float8"]\n[training]\nenable_float8_linear = true',
            {"model.converters": ["quantize.linear.float8"]},
        ),
        (
            "[training]\nbatch_size = 8\n[experimental]\npipeline_parallel_microbatches = 4",
            {"training.local_batch_size": 8, "parallelism.pipeline_parallel_microbatch_size": 2},
        ),
        ('[model]\ntokenizer_path = "assets/tok"', {"model.hf_assets_path": "assets/tok"}),
        ('[model]\ntokenizer_path = "/a/b.json"', {"model.hf_assets_path": "/a"}),
        ('[model]\ntokenizer_path = "./tokenizer.model"', {"model.hf_assets_path": "."}),
        ('[model]\ntokenizer_path = "./a/../tokenizer.model"', {"model.hf_assets_path": "./a/.."}),
        ('[model]\ntokenizer_path = "tokenizer.model"', {"model.hf_assets_path": "."}),
        ('[parallelism]\npipeline_parallel_split_points = ""', {}),
        (
            '[experimental]\npipeline_parallel_schedule = "Interleaved1F1B"',
            {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
        ),
        ("training.compile = true\ntraining.steps = 2", {"compile.enable": True, "training.steps": 2}),
        (
            "[training]\ncompile = true # 1\n[compile]\nbackend = 'x#y'",
            {"compile.enable": True, "compile.backend": "x#y"},
        ),
        (
            "[compile]\nbackend = 'eager'\n[training]\ncompile = true",
            {"compile.enable": True, "compile.backend": "eager"},
        ),
        ("[training]\ncompile = true", {"compile.enable": True}),
    ],
)
def test_values_that_change_with_their_key(tmp_path, old, new):
    for text in (old, old + "\n"):
        found = of(tmp_path, text)
        assert found.problems == [] and values(found.text) == new
        assert of(tmp_path, found.text).changes == []


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("[training]\ndata_parallel_shard_degree = 4", "parallelism.data_parallel_shard_degree"),
        ("[training]\ndata_parallel_replicate_degree = 2", "parallelism.data_parallel_replicate_degree"),
        ("[training]\ndisable_loss_parallel = true", "parallelism.disable_loss_parallel"),
        ("[training]\nenable_async_tensor_parallel = true", "parallelism.enable_async_tensor_parallel"),
        ("[experimental]\nenable_async_tensor_parallel = true", "parallelism.enable_async_tensor_parallel"),
        ("[experimental]\ncontext_parallel_degree = 2", "parallelism.context_parallel_degree"),
        ("[experimental]\ncontext_parallel_rotate_method = 'allgather'", "parallelism.context_parallel_rotate_method"),
        ("[experimental]\npipeline_parallel_schedule_csv = ''", "parallelism.pipeline_parallel_schedule_csv"),
        ("[experimental]\ncustom_args_module = ''", "job.custom_config_module"),
        ("[mx]\nrecipe_name = 'mxfp8_cublas'", "quantize.linear.mx.recipe_name"),
        ("[mx]\nfilter_fqns = ['output']", "quantize.linear.mx.filter_fqns"),
    ],
)
def test_keys_that_only_moved_keep_their_values(tmp_path, old, now):
    found = of(tmp_path, old)
    (before,) = values(old).values()
    assert found.problems == [] and values(found.text) == {now: before}


def test_float8_was_a_switch_of_its_section(tmp_path):
    found = of(tmp_path, "[float8]\nenable_float8_linear = true")
    assert found.problems == [] and values(found.text) == {"model.converters": ["quantize.linear.float8"]}


def test_stages_and_microbatches_of_both_sections(tmp_path):
    for section in ("experimental", "parallelism"):
        keys = "pipeline_parallel_split_points = ['layers.2']\npipeline_parallel_microbatches = 2"
        found = of(tmp_path, f"[training]\nlocal_batch_size = 8\n[{section}]\n{keys}")
        new = values(found.text)
        assert found.problems == [] and new["parallelism.pipeline_parallel_microbatch_size"] == 4
        assert new["parallelism.module_fqns_per_model_part"][1][0] == "layers.2"


@pytest.mark.parametrize(
    ("old", "output"),
    [
        ("[model]\nnorm_type = 'np_layernorm'", "there is RMSNorm"),
        ("[checkpoint]\ninterval_type = 'seconds'", "counts steps"),
        ("[float8]\nscaling_type_input = 'delayed'", "delayed scaling was removed"),
        ("[parallelism]\nenable_compiled_autograd = true", "removed in 0.2.1"),
        ("[training]\nbatch_size = 5\n[experimental]\npipeline_parallel_microbatches = 2", "local batch of 5"),
        ("[parallelism]\npipeline_parallel_split_points = ['layers.9']", "llama3 debugmodel has no layers.9"),
        ("[parallelism]\npipeline_parallel_split_points = ['layers.3', 'layers.2']", "one after another"),
        (
            "[model]\nname = 'flux'\n[parallelism]\npipeline_parallel_split_points = ['layers.3']",
            "no model known here",
        ),
        ("[training]\nbatch_size = 5\nlocal_batch_size = 6", "which the file sets as well, to 6"),
        ("training = { compile = true, steps = 3 }", "write this inline table as a section"),
        ("[training]\nsteppes = 3", "did you mean `training.steps`?"),
        ("[optimizer]\nfused = 'yes'", "must be true or false"),
    ],
)
def test_what_cannot_be_translated_is_a_problem_with_its_place(tmp_path, old, output):
    (problem,) = of(tmp_path, old).problems
    assert output in problem and "old.toml" in problem


def test_what_today_has_and_titan_refuses_is_no_problem_of_the_upgrade(tmp_path):
    found = of(
        tmp_path,
        "[training]\ncompile = true\n[comm]\nmode = 'local_tensor'\n[fault_tolerance]\nenable = true\nsync_steps = 3",
    )
    assert found.problems == [] and len(found.refused) == 3 and "sync_steps = 3" in found.text  # fmt: skip


def test_every_new_name_exists_and_no_old_one_does():
    known = set(origins(Config())) | set(REFUSED)
    assert set(RENAMED.values()) <= known
    assert not (set(GONE) | set(RENAMED)) & set(origins(Config()))
    assert {key for key, _ in RENAMED_VALUES} <= known


def test_windows_line_ends_stay_and_the_source_is_replaced_only_when_asked(tmp_path):
    path = tmp_path / "old.toml"
    path.write_bytes(b"[training]\r\ncompile = true\r\nsteps = 3\r\n")
    found = upgrade(path)
    assert found.data == b"[training]\r\nsteps = 3\r\n\r\n[compile]\r\nenable = true\r\n"
    with pytest.raises(ConfigError, match="exists already"):
        write_upgraded(found, path, replace=False)
    write_upgraded(found, path, replace=True)
    assert path.read_bytes() == found.data


_VALUES = st.sampled_from(["true", "false", "3", "-1", "0.1", '"x"', '["float8"]', '["layers.2"]', '"float8"'])
_KEYS = st.sampled_from([*RENAMED, *GONE, *origins(Config()), *REFUSED, "training.nonsense"])
_COMMENTS = st.sampled_from(["", "  # why", "\n# between\n"])


@settings(deadline=None)  # a busy machine is no fault
@given(st.dictionaries(_KEYS, st.tuples(_VALUES, _COMMENTS), max_size=12))
@example({"experimental.pipeline_parallel_schedule": ('["float8"]', "")})
def test_an_upgraded_file_loads_or_says_what_is_in_the_way(tmp_path_factory, given_keys):
    folder = tmp_path_factory.mktemp("upgrade")
    text = "# head\n"
    for section in {key.rpartition(".")[0]: None for key in given_keys}:
        mine = {key: value for key, value in given_keys.items() if key.rpartition(".")[0] == section}
        text += f"\n[{section}]\n" + "".join(f"{k.rpartition('.')[2]} = {v}{c}\n" for k, (v, c) in mine.items())
    assert "".join(line.text for line in read_lines(text)) == text
    found = of(folder, text)
    assert found.text.startswith("# head\n") and found.text.count("# between") == text.count("# between")
    if found.problems:
        return
    again = of(folder, found.text)
    assert again.changes == [] and again.text == found.text
    try:
        load_config(folder / "old.toml")
    except TitanError as error:
        assert found.refused or "model." in error.message


def test_it_needs_no_torch(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom trainer.config.upgrade import upgrade\n"
        f"upgrade(Path({str(CONFIGS / 'older' / 'release_0_1_0.toml')!r}))\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
