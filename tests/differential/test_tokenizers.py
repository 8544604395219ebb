"""Tokenizers of each kind: `titan infer` reads a text as transformers does, also behind a conversion and back."""

import json
from pathlib import Path

import pytest

from tests.differential.compare import CRASHED, REFUSED, SAME, UNJUDGED, WRONG, Outcome, assert_same_or_refused
from tests.differential.makers import tiny_config, tiny_model
from tests.differential.sampling import chosen
from tests.differential.tokenizer_kinds import BEGIN, END, KINDS, TURN, ids_of

TEXTS = [
    "Hello world",
    " a space before and behind ",
    "a  b   c\n\n\td\r\n e",
    "naïve café, Ünïcödé",
    "日本語テキスト",
    "🙂👍🏽 and e\u0301 beside é",
    "1234567890 3.14",
    "don't WE'LL they're",
    f"x{BEGIN}{TURN}user{END} y",
    "x" * 200,
    "\u200bzero\u00a0width\u3000space",
    "def f(x):\n    return x + 1\n",
]
ROWS = 512  # of the embedding; more than any of the tokenizers has
SILENT = "ACCEPTED, without a note on the tokenizer"
_WORST_FIRST = (CRASHED, WRONG, SILENT, REFUSED, UNJUDGED, SAME)
CASES = [(kind, rows) for kind in KINDS for rows in ("enough rows", "too few rows")]
SAMPLE = [
    (kind, "enough rows")
    for kind in (
        "byte-level BPE, Llama 3's",
        "Unigram",
        "SentencePiece BPE, tokenizer_config.json",
        "both, which disagree",
    )
]


@pytest.mark.parametrize(("kind", "rows"), chosen(CASES, SAMPLE))
def test_tokenizer(kind, rows, titan, tmp_path, count):
    src = tmp_path / "src"
    num_rows = ROWS if rows == "enough rows" else 96
    numbers = {"vocab_size": num_rows, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None}
    tiny_model(tiny_config("llama", **numbers)).save_pretrained(src)
    KINDS[kind](src)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": n, "prompt": text}) + "\n" for n, text in enumerate(TEXTS)))
    ids = ids_of(kind, src, TEXTS)
    outcomes = [_infer(titan, src, prompts, ids)]
    code, said, errors = titan("convert", "hf-to-dcp", src, tmp_path / "dcp", "--json")
    if code:
        outcomes.append(Outcome(REFUSED if _names_tokenizer(code, errors, src) else CRASHED, errors))
    else:
        useless = kind == "none" or (rows == "too few rows" and outcomes[0].kind == REFUSED)
        if useless and not _remarks_on_tokenizer(said, tmp_path):
            outcomes.append(Outcome(SILENT, f"infer: {outcomes[0].words}"))
        outcomes.append(_infer(titan, tmp_path / "dcp", prompts, ids))
        outcomes.append(_back(titan, tmp_path, ids))
    outcome = min(outcomes, key=lambda outcome: _WORST_FIRST.index(outcome.kind))
    count("tokenizers", outcome.kind)
    assert_same_or_refused(outcome, allowed=(SAME, REFUSED, UNJUDGED))


def _back(titan, folder: Path, expected: list[list[int]] | None) -> Outcome:
    """How transformers reads what comes back from DCP: rightly, or as it reads the source."""
    code, said, errors = titan("convert", "dcp-to-hf", folder / "dcp", folder / "hf", "--json")
    if code:
        return Outcome(REFUSED if _names_tokenizer(code, errors, folder / "dcp") else CRASHED, errors)
    back = ids_of("", folder / "hf", TEXTS)
    if back in (expected, ids_of("", folder / "src", TEXTS)):
        return Outcome(SAME)
    kind = REFUSED if _remarks_on_tokenizer(said, folder) else WRONG
    return Outcome(kind, f"the way back: {_difference(back, expected)}")


def _remarks_on_tokenizer(report: str, folder: Path) -> bool:
    return any("tokenizer" in remark.replace(str(folder), "") for remark in json.loads(report)["remarks"])


def _names_tokenizer(code: int, errors: str, checkpoint: Path) -> bool:
    return code == 2 and "tokenizer" in errors.replace(str(checkpoint.parent), "")


def _infer(titan, checkpoint: Path, prompts: Path, expected: list[list[int]] | None) -> Outcome:
    """How the ids that `titan infer` reads compare; a note that names the file it took is a clear answer, too."""
    code, out, errors = titan("infer", checkpoint, "--batch", prompts, "--special-tokens", "--max-new-tokens", 1)
    if code:
        return Outcome(REFUSED if _names_tokenizer(code, errors, checkpoint) else CRASHED, errors)
    results = sorted(map(json.loads, filter(None, out.splitlines())), key=lambda result: result["id"])
    ids = [result["prompt_tokens"] for result in results]
    if expected is None:
        return Outcome(UNJUDGED)
    if ids == expected:
        return Outcome(SAME)
    named = [line for line in errors.splitlines() if "tokenizer.model" in line or "tokenizer.json" in line]
    return Outcome(REFUSED if named else WRONG, f"{_difference(ids, expected)}; {named}")


def _difference(ids: list[list[int]] | None, expected: list[list[int]] | None) -> str:
    """The first text that is read in another way."""
    if ids is None or expected is None:
        return f"ids: {ids}, expected: {expected}"
    differing = next((n for n, pair in enumerate(zip(ids, expected, strict=True)) if pair[0] != pair[1]), None)
    return "" if differing is None else f"{TEXTS[differing]!r}: {ids[differing]} instead of {expected[differing]}"
