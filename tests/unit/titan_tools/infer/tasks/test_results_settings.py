"""A rerun of `titan infer --batch --out` keeps results only of the same weights and options; others are all named."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.json_lines import read_lines, write_lines
from titan_tools.infer.tasks.results_settings import settings_path

pytestmark = pytest.mark.usefixtures("one_thread")
LINES = [{"id": i, "prompt": f"def f{i}("} for i in range(3)]
ASKED = ("--max-new-tokens", "3", "--temperature", "1", "--logprobs", "2")


@pytest.fixture(scope="module")
def made(hf, tmp_path_factory):
    """The folder of a batch that was done as ASKED."""
    import sys

    from titan_tools import cli

    folder = tmp_path_factory.mktemp("made")
    write_lines(folder / "in.jsonl", LINES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*map(str, ("titan", *batch(hf, folder)))])
        assert cli.run() == 0
    return folder


@pytest.fixture
def place(made, tmp_path):
    """A copy of it, whose results file lacks a line."""
    folder = shutil.copytree(made, tmp_path / "place")
    (folder / "out.jsonl").write_bytes(b"".join((made / "out.jsonl").read_bytes().splitlines(keepends=True)[:2]))
    return folder


def batch(checkpoint, folder, *options, asked=ASKED):
    return ("infer", checkpoint, "--batch", folder / "in.jsonl", "--out", folder / "out.jsonl", *asked, *options)


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_every_other_option_is_named_with_both_values_and_nothing_is_lost(titan, hf, place, untouched):
    before = content_of(place)
    others = ("--max-new-tokens", "4", "--temperature", "0.5", "--logprobs", "3", "--seed", "7", "--top-k", "5")
    others += ("--top-p", "0.5", "--min-p", "0.1", "--repetition-penalty", "1.5", "--stop", "x", "--stop", "y")
    others += ("--ignore-eos", "--truncate", "left", "--from-bos", "--special-tokens", "--dtype", "bfloat16")
    code, out, err = titan(*batch(hf, place, *others, asked=()))
    assert (code, out, content_of(place)) == (2, "", before)
    assert err.splitlines() == [
        f"error: {place}/out.jsonl holds results of other settings:",
        '  --dtype: "float32" there, "bfloat16" here',
        "  --logprobs: 2 there, 3 here",
        "  --special-tokens: not given there, given here",
        "  --temperature: 1.0 there, 0.5 here",
        "  --top-k: not given there, 5 here",
        "  --top-p: not given there, 0.5 here",
        "  --min-p: not given there, 0.1 here",
        "  --repetition-penalty: 1.0 there, 1.5 here",
        "  --seed: 0 there, 7 here",
        "  --max-new-tokens: 3 there, 4 here",
        '  --stop: [] there, ["x", "y"] here',
        "  --ignore-eos: not given there, given here",
        '  --truncate: not given there, "left" here',
        "  --from-bos: not given there, given here",
        f"hint: a rerun needs the settings of the first run, recorded in {place}/out.jsonl.settings.json; "
        "nothing was written",
        "try: --out ANOTHER_FILE",
    ]


@pytest.mark.parametrize(
    "others, said",
    [
        (("--max-new-tokens", "4"), "--max-new-tokens: 3 there, 4 here"),  # what was cut would stay cut
        (("--quantize", "int8", "--tp", "2"), "--tp: not given there, 2 here"),
        (("--logprobs", "1"), "--logprobs: 2 there, 1 here"),
    ],
)
def test_a_finished_file_is_no_answer_to_other_options(titan, hf, made, untouched, others, said):
    before = content_of(made)
    code, out, err = titan(*batch(hf, made, *others))
    assert (code, out) == (2, "") and said in err and content_of(made) == before


def test_what_changes_no_result_may_change(titan, hf, made, untouched):
    code, _, talk = titan(*batch(hf, made, "--batch-size", "1", "--tp", "2", "--compile", "--dtype", "float32"))
    assert code == 0 and "all results are in" in talk


def test_the_seed_of_nothing_may_change(titan, hf, place):
    (place / "out.jsonl").unlink()
    assert titan(*batch(hf, place, asked=("--seed", "1", "--max-new-tokens", "2")))[0] == 0
    code, _, talk = titan(*batch(hf, place, asked=("--seed", "2", "--max-new-tokens", "2")))
    assert code == 0 and "nothing to do" in talk


def test_other_weights_of_the_same_shapes_are_noticed_and_a_moved_folder_is_not(titan, hf, place, untouched):
    moved, tuned = (shutil.copytree(hf, place / name) for name in ("moved", "tuned"))
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][-1, -1] += 1e-3
    save_file(weights, tuned / "model.safetensors", metadata={"format": "pt"})
    write_lines(place / "in.jsonl", LINES[:2])
    code, _, talk = titan(*batch(moved, place))
    assert code == 0 and "nothing to do" in talk
    code, _, err = titan(*batch(tuned, place))
    assert code == 2 and f"\n  weights: those of {hf} (sampled " in err and f" there, those of {tuned} (sampled " in err
    assert err.count(" here") == 1 and "\ntry: --out ANOTHER_FILE" in err


def test_numbers_of_the_model_are_settings(titan, hf, place, untouched):
    other = shutil.copytree(hf, place / "other")
    config = json.loads((other / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (other / "config.json").write_text(json.dumps(config))
    code, _, err = titan(*batch(other, place))
    assert code == 2 and "\n  model.norm_eps: " in err and " there, 0.001 here\n" in err


def _more_words(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|another|>"
    path.write_text(json.dumps(tokenizer))


def _other_ends(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "stop_strings": ["###"]}))


def _template(folder, template="{{ messages[0].content }}{# a remark #}"):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


@pytest.mark.parametrize(
    "change, named",
    [(_more_words, ["tokenizer"]), (_other_ends, ["stop tokens", "stop strings"]), (_template, ["chat template"])],
)
def test_what_is_next_to_the_weights_is_a_setting(titan, hf, place, change, named):
    """Also where no prompt's tokens show it."""
    checkpoint = shutil.copytree(hf, place / "hf")
    _template(checkpoint, "{{ messages[0].content }}")
    (place / "out.jsonl").unlink()
    asked = ("--chat", "--max-new-tokens", "2")
    assert titan(*batch(checkpoint, place, asked=asked))[0] == 0
    change(checkpoint)
    code, _, err = titan(*batch(checkpoint, place, asked=asked))
    output = [line.strip().partition(": ")[0] for line in err.splitlines() if line.startswith("  ")]
    assert code == 2 and output == named


def tokens_in(out):
    """Without what rounding may change from batch to batch."""
    return [(r["id"], r.get("sample"), r["tokens"], r["text"]) for r in read_lines(out.read_text())]


def test_samples_may_become_more(titan, hf, place):
    """Each time the end is that of a run with so many; a line made alone is numbered then."""
    out = place / "out.jsonl"
    for num in (2, 3):
        assert titan(*batch(hf, place, "--samples", num))[0] == 0
        grown, content = tokens_in(out), out.read_bytes()
        assert [one[:2] for one in grown] == [(i, sample) for i in range(3) for sample in range(num)]
        out.unlink()
        assert titan(*batch(hf, place, "--samples", num))[0] == 0 and tokens_in(out) == grown
        out.write_bytes(content)
    for num in ("1", "2"):
        code, _, err = titan(*batch(hf, place, "--samples", num))
        assert code == 2 and ": from a run with more --samples" in err and "at least as many --samples" in err
        assert out.read_bytes() == content


def test_a_full_disk_at_the_end_loses_no_sample(titan, hf, place, monkeypatch):
    """Lines of the first run are not numbered yet then; the next run numbers them."""
    out, replace = place / "out.jsonl", os.replace
    before = out.read_bytes()

    def full_for_results(source, target):
        if Path(target) == out:
            raise OSError(28, os.strerror(28))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_for_results)
    code, _, err = titan(*batch(hf, place, "--samples", "2"))
    assert code == 2 and f"error: cannot put {out} into the batch's order: No space left on device" in err
    assert out.read_bytes().startswith(before) and not [*place.glob(".tmp-*")]
    monkeypatch.setattr(os, "replace", replace)
    assert titan(*batch(hf, place, "--samples", "2"))[0] == 0
    assert [(r["id"], r["sample"]) for r in read_lines(out.read_text())] == [(i, n) for i in range(3) for n in (0, 1)]


def not_there(path):
    path.unlink()


def written(content):
    return lambda path: path.write_bytes(content)


def a_folder(path):
    path.unlink()
    path.mkdir()


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def a_loop(path):
    path.unlink()
    path.symlink_to(path)


NEWER = b'{"version": 2, "checkpoint": "x", "settings": {}}'
BROKEN = {
    "deleted": (not_there, "holds results, but {} is missing"),
    "empty": (written(b""), "{} is not a settings file of titan infer: {} is not JSON"),
    "cut off": (written(b'{"version": 1, "che'), "{} is not a settings file of titan infer: {} is not JSON"),
    "bytes": (written(b"\xff\0"), "{} is not a settings file of titan infer: {} is not JSON"),
    "a list": (written(b"[]"), "{} is not a settings file of titan infer: {} holds a JSON list"),
    "somebody's": (written(b'{"theme": "dark"}'), "{} is not a settings file of titan infer"),
    "newer": (written(NEWER), "{} is not a settings file of titan infer: it has no settings of version 1"),
    "settings that are none": (
        written(b'{"version": 1, "checkpoint": "x", "settings": []}'),
        "{} is not a settings file of titan infer: it has no settings of version 1",
    ),
    "a folder": (a_folder, "holds results, but {} is missing"),
    "a pipe": (a_pipe, "holds results, but {} is missing"),
    "a loop": (a_loop, "holds results, but {} is missing"),
}


@pytest.mark.parametrize("change, said", BROKEN.values(), ids=BROKEN)
def test_without_its_settings_a_file_is_not_gone_on_with(titan, hf, place, untouched, change, said):
    path = place / "out.jsonl.settings.json"
    change(path)
    before = content_of(place)
    code, out, err = titan(*batch(hf, place))
    assert (code, out, content_of(place)) == (2, "", before)
    assert said.format(path, path) in err and "nothing was written" in err and "try: --out ANOTHER_FILE" in err
    if path.is_file():  # nor is anything of new results written over it
        (place / "out.jsonl").unlink()
        assert titan(*batch(hf, place))[0] == 2 and "out.jsonl" not in content_of(place)


@pytest.mark.parametrize("moment", ['"yesterday"', "7"])
def test_a_recorded_time_that_is_none_is_reported(titan, hf, place, untouched, moment):
    path = place / "out.jsonl.settings.json"
    path.write_text(path.read_text().replace('"time in the prompts": null', f'"time in the prompts": {moment}'))
    code, out, err = titan(*batch(hf, place))
    assert (code, out) == (2, "") and f"{path} is not a settings file of titan infer: time in the prompts" in err


def test_settings_that_were_put_back_are_gone_on_with(titan, hf, made, place):
    path = place / "out.jsonl.settings.json"
    (place / "out.jsonl").rename(place / "moved.jsonl")
    path.rename(place / "moved.jsonl.settings.json")
    (place / "link").symlink_to("moved.jsonl")
    argv = [place / "link" if one == place / "out.jsonl" else one for one in batch(hf, place)]
    assert settings_path(place / "link") == place / "moved.jsonl.settings.json"
    assert titan(*argv)[0] == 0
    assert tokens_in(place / "moved.jsonl") == tokens_in(made / "out.jsonl")


def test_an_empty_file_takes_the_settings_of_whoever_comes(titan, hf, place):
    """So does one of which only the beginning of a line is left."""
    out = place / "out.jsonl"
    for content in (b"", b'{"id": 0, "pro'):
        out.write_bytes(content)
        assert titan(*batch(hf, place, "--seed", str(len(content))))[0] == 0
        output = json.loads((place / "out.jsonl.settings.json").read_text())["settings"]
        assert output["--seed"] == len(content) and len(read_lines(out.read_text())) == 3


def test_a_batch_in_the_place_of_the_settings_stays(titan, hf, tmp_path, untouched):
    path = write_lines(tmp_path / "out.settings.json", LINES[:1])
    before = path.read_bytes()
    code, _, err = titan("infer", hf, "--batch", path, "--out", tmp_path / "out")
    assert code == 2 and f"{path} is not a settings file of titan infer" in err and path.read_bytes() == before


def test_a_name_that_leaves_no_room_for_the_settings_is_refused(titan, hf, place, untouched):
    code, _, err = titan("infer", hf, "--batch", place / "in.jsonl", "--out", place / ("x" * 250))
    assert code == 2 and "File name too long" in err and not (place / ("x" * 250)).exists()


def test_scores_are_of_a_context_and_no_completions(titan, hf, place):
    before = content_of(place)
    code, _, err = titan(*batch(hf, place, "--score", asked=()))
    assert code == 2 and "\n  --score: not given there, given here\n" in err and content_of(place) == before
    assert "--ignore-eos" not in err  # nor any other option that scores do not have
    (place / "out.jsonl").unlink()
    assert titan(*batch(hf, place, "--score", asked=()))[0] == 0
    code, _, talk = titan(*batch(hf, place, "--score", "--context", "256", asked=()))  # the model's
    assert code == 0 and "nothing to do" in talk
    code, _, err = titan(*batch(hf, place, "--score", "--context", "99", asked=()))
    assert code == 2 and "\n  --context: 256 there, 99 here\n" in err and err.count(" here") == 1


def test_the_file_is_for_people_too(hf, made):
    output = json.loads(Path(made / "out.jsonl.settings.json").read_text())
    assert list(output) == ["version", "checkpoint", "settings"] and output["checkpoint"] == str(hf)
    assert output["settings"]["--temperature"] == 1.0 and output["settings"]["stop tokens"] == [257]
