"""Each command reads a folder's tokenizer as transformers does, wherever the folder declares its tokens.

The cases are {files} x {where tokens are declared}; each is judged for every command.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from converters.common.errors import TitanError
from converters.source.weights import open_native
from tests.differential.compare import REFUSED, SAME, UNJUDGED, WRONG, Outcome, assert_same_or_refused
from tests.differential.makers import tiny_config, tiny_model
from tests.differential.sampling import every
from tests.differential.test_tokenizers import TEXTS
from tests.differential.tokenizer_declarations import (
    CHATML,
    DECLARATIONS,
    START,
    STOP,
    TOOL,
    config,
)
from tests.differential.tokenizer_kinds import KINDS
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.loading import prepare_work
from titan_tools.infer.request import Request
from titan_tools.infer.tasks.one_prompt import make_conversation, make_prompt
from titan_tools.infer.tasks.score import tokenize_text
from trainer.data.sources import Document
from trainer.data.text_index import Preparation, index_text

ROWS = 1024
NEITHER = "a tokenizer without begin and end"
WORDS = [*TEXTS, f"{START}user\nhi there{STOP}\n", f"a {TOOL} word, lazy {TOOL}dog", "<s>a</s> <unk> [CLS]x"]
MESSAGES = [{"role": "user", "content": "hi, the lazy dog"}, {"role": "assistant", "content": " it's 3.14 "}]
CHAT = [*MESSAGES, {"role": "user", "content": "naïve café?"}]
FILES = [kind for kind in KINDS if kind != "none"]
CASES = [(files, declared) for files in FILES for declared in DECLARATIONS]
TEMPLATES = ("chat_template.jinja", "tokenizer_config.json", "additional_chat_templates", "a list")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {}
    for family in ("llama", "qwen3"):
        folders[family] = tmp_path_factory.mktemp(family)
        numbers = {"vocab_size": ROWS, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None}
        tiny_model(tiny_config(family, **numbers)).save_pretrained(folders[family])
        (folders[family] / "generation_config.json").unlink(missing_ok=True)
    return folders


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    """Folders of vocabularies by kind, each made once."""
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("vocabulary")
            KINDS[kind](made[kind])
        return made[kind]

    return folder_of


@pytest.mark.parametrize(("files", "declared"), every(CASES, num=8))
def test_every_command(files, declared, models, vocabularies, titan, tmp_path, count):
    number = CASES.index((files, declared))
    family = ("llama", "qwen3")[number % 2]
    folder = tmp_path / "folder"
    shutil.copytree(vocabularies(files), folder)
    DECLARATIONS[declared](folder)
    if declared != "no tokenizer_config.json" and files != "tiktoken alone":
        _write_template(folder, TEMPLATES[number % len(TEMPLATES)])
    for path in models[family].iterdir():
        os.link(path, folder / path.name)
    theirs = _reference(folder, files)
    outcomes = {
        **{
            f"{command}, special tokens are {'tokens' if special else 'text'}": _judged(
                partial(ours, special), partial(reference, special)
            )
            for special in (False, True)
            for command, ours, reference in (
                ("prepare", partial(_prepared, titan, folder, tmp_path), partial(_documents, folder, theirs)),
                ("train", partial(_trained_on, folder, tmp_path), partial(_documents, folder, theirs)),
                ("score", partial(_scored, folder), partial(_scored_as, theirs)),
            )
        },
        "prompt": _judged(
            lambda: [_prompts(folder, special=special) for special in (True, False)],
            lambda: [
                [theirs(text).input_ids or None for text in WORDS],
                [theirs(text, split_special_tokens=True).input_ids or None for text in WORDS],
            ],
        ),
        "chat": _judged(
            lambda: _chat(folder),
            lambda: theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False),
        ),
        "convert": _judged(lambda: _converted(titan, folder, tmp_path), lambda: _converted_as(theirs)),
    }
    for command, outcome in outcomes.items():
        count(f"tokenizer folders, {command}", outcome.kind)
    for command, outcome in outcomes.items():
        assert_same_or_refused(replace(outcome, words=f"{command}: {outcome.words}"), allowed=(SAME, REFUSED, UNJUDGED))


def _write_template(folder: Path, place: str) -> None:
    if place == "chat_template.jinja":
        (folder / place).write_text(CHATML)
        config(folder, chat_template="hidden")
    elif place == "additional_chat_templates":
        (folder / place).mkdir()
        (folder / place / "default.jinja").write_text(CHATML)
        (folder / place / "rag.jinja").write_text("another")
    else:
        named = [{"name": "rag", "template": "another"}, {"name": "default", "template": CHATML}]
        config(folder, chat_template=CHATML if place == "tokenizer_config.json" else named)


def _reference(folder: Path, files: str) -> Any:
    """transformers' tokenizer of the folder; None where it cannot be opened or is empty.

    A tiktoken file with nothing declared beside it is Meta's, for which transformers knows no special tokens.
    """
    beside = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    if files == "tiktoken alone" and not any((folder / name).exists() for name in beside):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception:  # of whatever type
        return None
    return tokenizer if len(tokenizer) > 10 else None


def _judged(ours: Callable[[], Any], theirs: Callable[[], Any]) -> Outcome:
    try:
        expected = theirs()
    except Exception as error:  # no template, or no tokenizer at all
        return Outcome(UNJUDGED, str(error))
    try:
        found: Any = ours()
    except TitanError as error:
        found = Outcome(REFUSED, error.message)
    if expected == NEITHER:
        return found if isinstance(found, Outcome) else Outcome(WRONG, "documents without begin and end are accepted")
    if isinstance(found, Outcome):
        return Outcome(WRONG, f"refused, but transformers reads it: {found.words}")
    return Outcome(SAME) if found == expected else Outcome(WRONG, _difference(found, expected))


def _difference(found: Any, expected: Any) -> str:
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected) == len(WORDS):
        place = next(n for n, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        return f"{WORDS[place]!r}: {found[place]} instead of {expected[place]}"
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return "; ".join(_difference(a, b) for a, b in zip(found, expected, strict=True) if a != b)
    return f"{found} instead of {expected}"[:2000]


def _split(special: bool) -> dict[str, bool]:
    """How transformers is asked to read special tokens in a text: as it does by itself, or as text."""
    return {} if special else {"split_special_tokens": True}


def _documents(folder: Path, theirs: Any, special: bool) -> Any:
    """Between begin and end, or refused where the tokenizer has neither."""
    path = folder / "tokenizer_config.json"
    says_none = path.exists() and json.loads(path.read_text()).get("add_bos_token") is False
    begin = [] if says_none or theirs.bos_token_id is None else [theirs.bos_token_id]
    end = [] if theirs.eos_token_id is None else [theirs.eos_token_id]
    if not begin + end:
        return NEITHER
    bare = [theirs(text, add_special_tokens=False, **_split(special)).input_ids for text in WORDS]
    return [[*begin, *ids, *end] for ids in bare]


def _prepared(titan: Any, folder: Path, place: Path, special: bool) -> list[list[int]]:
    (place / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in WORDS))
    out = place / f"prepared-{special}"
    options = ["--tokenizer", folder, "--out", out, "--held-out", "0", *(["--special-tokens"] if special else [])]
    code, _, errors = titan("data", "prepare", place / "docs.jsonl", *options)
    if code:
        raise TitanError(errors)
    tokens, offsets = np.load(out / "train_tokens.npy"), np.load(out / "train_offsets.npy").tolist()
    assert offsets[0] == 0
    ends = [*offsets[1:], len(tokens)] if len(offsets) == len(WORDS) else offsets[1:]
    return [tokens[a:b].tolist() for a, b in zip(offsets, ends, strict=False)]


def _trained_on(folder: Path, place: Path, special: bool) -> list[list[int]]:
    documents = [Document(text, f"line {n}") for n, text in enumerate(WORDS)]
    keys = {"once": lambda work: work(), "say": lambda text: None, "special_tokens": special}
    preparation = Preparation(folder, place / "indexes", **keys)
    index = index_text("text", lambda: 0, lambda: documents, preparation)
    tokens, offsets = index.tokens("train"), index.offsets("train").tolist()
    ends = [*offsets[1:], len(tokens)] if len(offsets) == len(WORDS) else offsets[1:]
    return [tokens[a:b].tolist() for a, b in zip(offsets, ends, strict=False)]


def _work(folder: Path, **options: Any) -> Any:
    request = Request(folder, Sampling(), **options)
    with nullcontext(open_native(folder)) as weights:
        return prepare_work(request, weights)


def _scored(folder: Path, special: bool) -> list[list[int] | None]:
    work = _work(folder, score=True, special_tokens=special)
    return [_or_refused(lambda text=text: list(tokenize_text(work, id=0, prompt=text).tokens)) for text in WORDS]


def _or_refused(tokens_of: Callable[[], list[int]]) -> list[int] | None:
    """None for a text that is refused, since it has no token."""
    try:
        return tokens_of()
    except TitanError:
        return None


def _scored_as(theirs: Any, special: bool) -> list[list[int] | None]:
    def one(text: str) -> list[int] | None:
        framed, bare = (theirs(text, add_special_tokens=flag, **_split(special)).input_ids for flag in (True, False))
        start = next(n for n in range(len(framed) + 1) if framed[n : n + len(bare)] == bare)
        return framed[: start + len(bare)] if bare and start + len(bare) > 1 else None

    return [one(text) for text in WORDS]


def _prompts(folder: Path, *, special: bool) -> list[list[int] | None]:
    work = _work(folder, special_tokens=special)
    return [_or_refused(lambda text=text: make_prompt(work, 0, text).tokens) for text in WORDS]


def _chat(folder: Path) -> list[int]:
    return make_conversation(_work(folder, chat=True), 0, CHAT).tokens


def _converted(titan: Any, folder: Path, place: Path) -> list[Any]:
    """Ids that a conversion writes, and what is read of the DCP and of the way back."""
    for step in (("hf-to-dcp", folder, place / "dcp"), ("dcp-to-hf", place / "dcp", place / "hf")):
        code, _, errors = titan("convert", *step)
        if code:
            raise TitanError(errors)
    path = place / "hf" / "generation_config.json"
    written = json.loads(path.read_text()) if path.exists() else {}
    ids = {key: written[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in written}
    back = AutoTokenizer.from_pretrained(place / "hf")
    return [ids, _prompts(place / "dcp", special=True), [back(text).input_ids or None for text in WORDS]]


def _converted_as(theirs: Any) -> list[Any]:
    ids = {key: getattr(theirs, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    prompts = [theirs(text).input_ids or None for text in WORDS]
    return [{key: id for key, id in ids.items() if id is not None}, prompts, prompts]
