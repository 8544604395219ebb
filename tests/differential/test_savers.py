"""Checkpoints written by torch's own savers: converted with --model-from, they answer as transformers' model does."""

import shlex
from pathlib import Path

import pytest

from converters.common.errors import TitanError
from tests.differential.compare import (
    NO_WAY_OUT,
    REFUSED,
    SAME,
    UNCLEAR,
    Outcome,
    answers,
    assert_same_or_refused,
    attempt,
    load_reference,
)
from tests.differential.makers import tiny_config, tiny_model
from tests.differential.sampling import chosen
from tests.differential.savers import SAVERS
from tests.dist.pool import Pool
from tests.doors import convert

MODELS = {"llama": {}, "qwen3": {"tie_word_embeddings": True, "head_dim": 8}}
SAMPLE = [
    ("llama", saver)
    for saver in (
        *("dcp, under model", "dcp, with an optimizer", "torch.save, compiled", "torch.save, DataParallel"),
        *("torch.save, _checkpoint_wrapped_module", "Lightning", "accelerate, its folder", "torch.save, legacy"),
    )
]


@pytest.fixture(scope="module")
def run_ranks():
    """`run_ranks(num, function, *arguments)`: the function on that many gloo ranks."""
    pools: dict[int, Pool] = {}
    yield lambda num, *call: pools.setdefault(num, Pool(num)).run(*call)
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """HF folders of tiny models, by model type."""
    folders = {}
    for model_type, numbers in MODELS.items():
        folders[model_type] = tmp_path_factory.mktemp(model_type)
        tiny_model(tiny_config(model_type, **numbers)).save_pretrained(folders[model_type])
    return folders


@pytest.mark.parametrize(("model_type", "saver"), chosen([(m, s) for s in SAVERS for m in MODELS], SAMPLE))
def test_saver(model_type, saver, hf, run_ranks, titan, tmp_path, count):
    saver, hf = SAVERS[saver], hf[model_type]
    out, scratch = tmp_path / saver.name, tmp_path / "scratch"
    scratch.mkdir()
    if saver.ranks:
        run_ranks(saver.ranks, saver.save, hf, out)
    else:
        saver.save(hf, out)
    reference = load_reference(hf)
    refusals: list[TitanError] = []

    def convert_and_compare(src: Path, name: str) -> None:
        try:
            convert(src, scratch / name, to="dcp", model_from=hf)
        except TitanError as error:
            refusals.append(error)
            raise
        answers(scratch / name, reference)

    outcome = attempt(lambda: convert_and_compare(out / saver.given, "dcp"), scratch, names=[])
    if outcome.kind == UNCLEAR:  # a refusal is right where it says what to do instead, and that works
        (refusal,) = refusals
        if saver.is_python_only:
            outcome = Outcome(REFUSED if refusal.hint and not refusal.tries else NO_WAY_OUT, outcome.words)
        else:
            outcome = _try(refusal, titan, lambda src: convert_and_compare(src, "tried"), scratch)
    count("savers", outcome.kind)
    assert_same_or_refused(outcome)


def _try(refusal, titan, convert_and_compare, scratch) -> Outcome:
    """What the first of the refusal's commands, or of its other sources, leads to."""
    if not refusal.tries:
        return Outcome(NO_WAY_OUT, f"{refusal.message}\n{refusal.hint}")
    words = shlex.split(refusal.tries[0])
    if words[0] == "titan":
        code, _, problem = titan(*words[1:])
        problem = problem if code else ""
    else:
        tried = attempt(lambda: convert_and_compare(Path(words[0])), scratch, names=[])
        problem = "" if tried.kind == SAME else f"{tried.kind}: {tried.words}"
    return Outcome(NO_WAY_OUT if problem else REFUSED, f"{refusal.message}\ntried {refusal.tries[0]}: {problem}")
