"""Tokenizers from one form to another: tiktoken, tokenizers, sentencepiece and transformers say whether ids stay."""

import json
import random
import shutil
import tracemalloc
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig

from converters.common.errors import CheckpointError, UnsupportedError
from converters.tokenizers.assets import find_assets, read_token_ids, tokenizer_remark, write_assets
from converters.tokenizers.assets import write_tokenizer_for_hf as write_for_hf
from converters.tokenizers.assets import write_tokenizer_for_meta as write_for_meta
from converters.tokenizers.sentencepiece_model import read_sentencepiece
from converters.tokenizers.tiktoken_from_json import ranks_of_tokenizer_json, write_ranks
from converters.tokenizers.tiktoken_model import BYTE_LETTERS, LLAMA3_PATTERN, read_ranks, special_tokens_after
from converters.tokenizers.tokenizer import load_tokenizer
from converters.tokenizers.tokenizer_json import read_tokenizer_json
from tests.doors import convert
from tests.models.dense import family_of
from tests.models.dense import write as write_tiny
from tests.models.llama import write_tokenizer

THIS_FILE = Path(__file__).read_text(encoding="utf-8")
ROWS = 700  # of the embedding
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz ",
    "ETAOIN shrdlu 0123456789.,'",
    "def if(x): return[]{}=+-*/\n\t  ",
    "àéîõüßñçøæœ ÀÉ",
    "漢字かなカナ한국어 ру́сский",
    "🙂👩‍👩‍👧‍👦🇩🇪 \u200b\ufeff\u00a0\u3000\r\n",
    "".join(map(chr, range(1, 0x250))),
)


def texts(count: int = 2000) -> list[str]:
    """Pieces of this file and strings of letters that go together, and a few that nobody would write."""
    rng = random.Random(7)
    made = ["", " ", "  a", "a  ", "\n\n", "'S'll've", "1234567", "\x00", "\U0010ffff", "e\u0301", "ﬁ Å ①"]
    while len(made) < count:
        if rng.random() < 0.3:
            start = rng.randrange(len(THIS_FILE))
            made.append(THIS_FILE[start : start + rng.randrange(80)])
        else:
            made.append("".join(rng.choices(rng.choice(ALPHABETS), k=rng.randrange(40))))
    return made


def llama3_cut() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.fixture(scope="module")
def trained():
    """A byte-level tokenizer as tokenizers trains one: only the merges that training made, ids in their order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = llama3_cut(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([THIS_FILE], trainer)
    tokenizer.add_special_tokens(special_tokens_after(600, vocab_size=620))
    return json.loads(tokenizer.to_str())


def write(folder: Path, content: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


def judge(path: Path, special: dict[str, int], monkeypatch) -> tiktoken.Encoding:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # else it would serve a file of the same name read earlier
    ranks = load_tiktoken_bpe(str(path))
    return tiktoken.Encoding("test", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("whole", [False, True])
def test_tiktoken_gives_the_ids_of_tokenizer_json(trained, whole, tmp_path, monkeypatch):
    content = trained | {"model": trained["model"] | {"ignore_merges": whole}}
    assets = {"tokenizer.json": write(tmp_path / "hf", content)}
    assert tokenizer_remark(assets, to="meta", vocab_size=ROWS) == ""
    assert write_for_meta(tmp_path, assets, vocab_size=ROWS) == ["tokenizer.model"]
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    theirs, ours = (
        Tokenizer.from_file(str(assets["tokenizer.json"])),
        judge(tmp_path / "tokenizer.model", special, monkeypatch),
    )
    for text in [*texts(), "<|begin_of_text|>x<|eot_id|>"]:
        assert ours.encode(text, allowed_special="all") == theirs.encode(text).ids, repr(text)


def test_there_and_back_is_the_same_file(trained, tmp_path):
    """tokenizer.json → tokenizer.model → transformers' files → the same tokenizer.model; and the same ids."""
    assets = {"tokenizer.json": write(tmp_path / "hf", trained)}
    (tmp_path / "meta").mkdir()
    write_for_meta(tmp_path / "meta", assets, vocab_size=ROWS)
    (tmp_path / "again").mkdir()
    write_for_hf(tmp_path / "again", find_assets(tmp_path / "meta"), vocab_size=ROWS, max_seq_len=64)
    write_for_meta(tmp_path, {"tokenizer.json": tmp_path / "again" / "tokenizer.json"}, vocab_size=ROWS)
    assert (tmp_path / "tokenizer.model").read_bytes() == (tmp_path / "meta" / "tokenizer.model").read_bytes()
    first, again = (Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("hf", "again"))
    assert all(first.encode(text).ids == again.encode(text, add_special_tokens=False).ids for text in texts(300))


def test_a_tokenizer_model_is_never_written_over(trained, tmp_path):
    write(tmp_path, trained)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\n")
    assert write_for_meta(tmp_path, find_assets(tmp_path), vocab_size=ROWS) == []
    assert write_for_meta(tmp_path, {}, vocab_size=ROWS) == []


def moved(added: list[dict], text: str, to: str) -> list[dict]:
    """The special tokens, `text` and `to` with each other's ids."""
    ids = {token["content"]: token["id"] for token in added}
    swapped = ids | {text: ids[to], to: ids[text]}
    return [token | {"id": swapped[token["content"]]} for token in added]


CHANGES = {
    "normalizes": lambda c: c | {"normalizer": {"type": "NFC"}},  # Qwen's
    "pattern": lambda c: c | {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}},
    "pattern ": lambda c: c | {"pre_tokenizer": None},
    "not BPE": lambda c: c | {"model": {"type": "Unigram"}},
    "byte_fallback": lambda c: c | {"model": c["model"] | {"byte_fallback": True}},
    "unk_token": lambda c: c | {"model": c["model"] | {"unk_token": "!"}},
    "<|eot_id|>": lambda c: c | {"added_tokens": moved(c["added_tokens"], "<|eot_id|>", "<|python_tag|>")},
    "<|im_start|>": lambda c: c | {"added_tokens": [*c["added_tokens"], {"id": 650, "content": "<|im_start|>"}]},
    "not bytes": lambda c: c | {"model": c["model"] | {"vocab": c["model"]["vocab"] | {"▁the": 620}}},
    "consecutive from 0": lambda c: c | {"model": c["model"] | {"vocab": c["model"]["vocab"] | {"zqzq": 1000}}},
    "do not result in a token": lambda c: c | {"model": c["model"] | {"merges": [*c["model"]["merges"], ["z", "!"]]}},
    "order of their tokens": lambda c: c | {"model": c["model"] | {"merges": c["model"]["merges"][::-1]}},
    "is merged differently": lambda c: c | {"model": c["model"] | {"merges": c["model"]["merges"][:-1]}},
}  # fmt: skip


@pytest.mark.parametrize("said", CHANGES)
def test_what_no_tokenizer_model_can_say_is_refused_and_reported(said, trained, tmp_path):
    path = write(tmp_path / "hf", CHANGES[said](trained))
    with pytest.raises(UnsupportedError) as error:
        ranks_of_tokenizer_json(path, vocab_size=ROWS)
    assert said.strip() in error.value.message and str(path) in error.value.message
    assets = {"tokenizer.json": path}
    assert write_for_meta(tmp_path, assets, vocab_size=ROWS) == []
    assert said.strip() in tokenizer_remark(assets, to="meta", vocab_size=ROWS)
    assert tokenizer_remark(assets, to="hf", vocab_size=ROWS) == ""


def test_a_reader_with_a_list_of_special_tokens_takes_any(trained, tmp_path):
    path = write(tmp_path, CHANGES["<|eot_id|>"](trained))
    assert len(ranks_of_tokenizer_json(path, vocab_size=None)) == 600


def test_damage_is_an_error_not_a_remark(trained, tmp_path):
    for change in ({"model": None}, {"added_tokens": [{"content": "x"}]}, {"model": {"type": "BPE"}}):
        with pytest.raises(CheckpointError, match="not a tokenizer.json"):
            ranks_of_tokenizer_json(write(tmp_path, trained | change), vocab_size=ROWS)
    with pytest.raises(CheckpointError, match="cannot read"):
        ranks_of_tokenizer_json(tmp_path / "none.json", vocab_size=ROWS)


def table(merges: list[tuple[bytes, bytes]], *, whole: bool) -> dict:
    """tokenizer.json of the 256 bytes and of what `merges` make, ids in the order given."""

    def spell(token: bytes) -> str:
        return "".join(BYTE_LETTERS[byte] for byte in token)

    tokens = dict.fromkeys([*(bytes([i]) for i in range(256)), *(a + b for a, b in merges)])
    model = models.BPE(
        {spell(token): id for id, token in enumerate(tokens)},
        [(spell(a), spell(b)) for a, b in dict.fromkeys(merges)],
        ignore_merges=whole,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = llama3_cut()
    return json.loads(tokenizer.to_str())


def test_another_way_to_a_token_is_another_tokenizer(tmp_path, monkeypatch):
    """Merging "bc" before "ab" by rank, though only ("ab", "c") is listed: the judges disagree, so it is refused."""
    content = table([(b"b", b"c"), (b"a", b"b"), (b"ab", b"c")], whole=True)
    path = write(tmp_path, content)
    with pytest.raises(UnsupportedError, match="is merged differently"):
        ranks_of_tokenizer_json(path, vocab_size=ROWS)
    vocab = {text.encode(): id for text, id in content["model"]["vocab"].items() if text.isascii() and len(text) > 1}
    write_ranks(tmp_path / "tokenizer.model", {bytes([i]): i for i in range(256)} | vocab)
    theirs, ours = Tokenizer.from_file(str(path)), judge(tmp_path / "tokenizer.model", {}, monkeypatch)
    assert ours.encode("xabc") != theirs.encode("xabc").ids


@st.composite
def tables(draw) -> dict:
    """Pairs of tokens that are there already, in any order: some tables tiktoken can say, most it cannot."""
    known, merges = [b"a", b"b", b"c"], []
    for _ in range(draw(st.integers(1, 7))):
        pair = draw(st.tuples(st.sampled_from(known), st.sampled_from(known)))
        if len(pair[0] + pair[1]) <= 6:
            merges.append(pair)
            known.append(pair[0] + pair[1])
    ids = list(dict.fromkeys(a + b for a, b in merges))
    merges.sort(key=lambda pair: ids.index(pair[0] + pair[1]))
    return table(merges, whole=draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(tables(), st.lists(st.text("abc", min_size=1, max_size=14), min_size=20, max_size=20))
def test_a_translation_is_exact_or_refused(tmp_path_factory, content, samples):
    path = write(tmp_path_factory.mktemp("table"), content)
    try:
        ranks = ranks_of_tokenizer_json(path, vocab_size=ROWS)
    except UnsupportedError:
        return
    theirs = Tokenizer.from_file(str(path))
    ours = tiktoken.Encoding("t", pat_str=LLAMA3_PATTERN, mergeable_ranks=dict(ranks), special_tokens={})
    for text in samples:
        assert ours.encode(text) == theirs.encode(text).ids


# Strings with all that JSON and a search for it could stumble over
TRICKY = ['"', "\\", "[", "]", ", ", '"]', '"merges": [', "\\\\", "ü", "\u2581", "a"]


@pytest.mark.parametrize("spell", ["lists", "texts"])
@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}], ids=str)
def test_merges_are_read_one_by_one(spell, layout, tmp_path):
    pairs = [[a, b] for a in TRICKY for b in TRICKY]
    merges = pairs if spell == "lists" else [f"{a} {b}" for a, b in pairs]
    for some in (merges, merges[:1], []):
        model = {"type": "BPE", "vocab": {text: id for id, text in enumerate(TRICKY)}, "merges": some, "end": 1}
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({"added_tokens": [], "model": model}, **layout), encoding="utf-8")
        content, found = read_tokenizer_json(path)
        assert list(found) == some and content["model"].pop("merges", []) == []
        assert content == {"added_tokens": [], "model": {key: model[key] for key in ("type", "vocab", "end")}}


def test_merges_elsewhere_and_of_other_kinds_are_left_to_json(tmp_path):
    path = tmp_path / "tokenizer.json"
    for model in ({"merges": [["a", "b", "c"]]}, {"merges": [1, 2]}, {"merges": None}):
        path.write_text(json.dumps({"merges": ["x y"], "model": model}))
        content, found = read_tokenizer_json(path)
        assert found == model["merges"] and content == {"merges": ["x y"], "model": {}}
    for text in ('{"model": {"merges": ["a b"]', '["a"]', '{"merges": []} x', ""):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="tokenizer.json"):
            read_tokenizer_json(path)


def test_a_large_tokenizer_is_read_in_little_memory(tmp_path):
    path = tmp_path / "tokenizer.json"
    merges = [[f"left{i}", f"right{i}"] for i in range(30_000)]
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": merges}}))
    peaks = []
    for reader in (lambda: sum(1 for _ in read_tokenizer_json(path)[1]), lambda: len(json.loads(path.read_bytes()))):
        tracemalloc.start()
        reader()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 1.5 * path.stat().st_size and peaks[0] < peaks[1] / 3


# SentencePiece, as Llama 2 has it


def train_sentencepiece(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text").write_text(THIS_FILE, encoding="utf-8")
    llama2 = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "vocab_size": 600,
    }
    places = {"input": folder / "text", "model_prefix": folder / "m", "num_threads": 1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(**{**llama2, **places, **changes})
    (folder / "m.vocab").unlink()
    (folder / "text").unlink()
    return (folder / "m.model").rename(folder / "tokenizer.model")


@pytest.fixture(scope="module")
def meta_llama2(tmp_path_factory):
    return train_sentencepiece(tmp_path_factory.mktemp("llama2"))


def test_transformers_gives_the_ids_of_sentencepiece(meta_llama2, tmp_path):
    assets = find_assets(meta_llama2.parent)
    assert write_for_hf(tmp_path, assets, vocab_size=ROWS, max_seq_len=64) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert tokenizer_remark(assets, to="hf", vocab_size=ROWS) == ""
    shutil.copy(meta_llama2, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    theirs, ours = (
        sentencepiece.SentencePieceProcessor(model_file=str(meta_llama2)),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    assert len(ours) == len(theirs) == 600
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_id(), theirs.eos_id()) == (1, 2)
    for text in texts():
        if any(token in text for token in ("<unk>", "<s>", "</s>")):  # which transformers takes for the tokens
            continue
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, repr(text)
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == theirs.decode(ids)


def test_token_ids_of_sentencepiece(meta_llama2, tmp_path):
    assert read_token_ids(find_assets(meta_llama2.parent), vocab_size=ROWS) == {"bos_token_id": 1, "eos_token_id": 2}
    other = train_sentencepiece(tmp_path, pad_id=0, unk_id=3, bos_id=2, eos_id=1)
    ids = read_token_ids(find_assets(other.parent), vocab_size=ROWS)
    assert ids == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "unigram"}, "not of type BPE"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalizes"),
        ({"add_dummy_prefix": False}, "normalizes"),
        ({"byte_fallback": False}, "as bytes"),
        ({"user_defined_symbols": ["<fim>"]}, "user-defined"),
        ({"eos_id": -1}, "no end of text"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_sentencepiece_models_are_carried_and_reported(changes, said, tmp_path):
    path = train_sentencepiece(tmp_path / "meta", **changes)
    assets = find_assets(path.parent)
    assert write_for_hf(tmp_path, assets, vocab_size=ROWS, max_seq_len=64) == []
    remark = tokenizer_remark(assets, to="hf", vocab_size=ROWS)
    assert said in remark and "copied without a translation" in remark
    assert tokenizer_remark(assets, to="meta", vocab_size=ROWS) == ""
    assert write_assets(tmp_path / "out", assets, {}) == ["tokenizer.model"]
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == path.read_bytes()


def test_what_is_neither_is_carried_unread(tmp_path):
    for content in (b"version https://git-lfs.github.com/spec/v1\n", b"", b"\x80\x04."):
        (tmp_path / "tokenizer.model").write_bytes(content)
        assets = find_assets(tmp_path)
        assert read_sentencepiece(assets["tokenizer.model"]) is None
        assert read_token_ids(assets, vocab_size=ROWS) == {}
        assert write_for_hf(tmp_path, assets, vocab_size=ROWS, max_seq_len=1) == []
        assert "neither tiktoken nor SentencePiece" in tokenizer_remark(assets, to="hf", vocab_size=ROWS)


def test_normalizers_are_seen_in_a_qwen_tokenizer(trained, tmp_path):
    """Built by tokenizers itself: Qwen's NFC makes one id of two characters, and no rank table does."""
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert "NFC" in tokenizer_remark(find_assets(tmp_path), to="meta", vocab_size=ROWS)


def test_ranks_are_read_back(tmp_path):
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256}
    write_ranks(tmp_path / "tokenizer.model", ranks)
    assert read_ranks(tmp_path / "tokenizer.model") == ranks


# Whole conversions


def beside(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def read(folder: Path, names) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen3_tied"])
def test_what_goes_with_the_weights_goes_everywhere(name, tmp_path):
    """Every file that a model of the hub has beside its weights, byte for byte: to DCP, to Meta and back."""
    write_tiny(tmp_path / "hf", name)
    write_tokenizer(tmp_path / "hf")
    files = {
        "generation_config.json": b'{"bos_token_id": 256, "eos_token_id": [257, 255],\n "temperature": 0.6}',
        "tokenizer_config.json": b'{"bos_token": "<|begin_of_text|>", "chat_template": "{{ messages }}"}',
        "special_tokens_map.json": b'{"bos_token": "<|begin_of_text|>"}',
        "added_tokens.json": b"{}",
        "chat_template.jinja": "{{ 'ü' }}\r\n".encode(),
        "chat_template.json": b'{"chat_template": "{{ x }}"}',
        "additional_chat_templates/tools.jinja": b"{{ tools }}",
        "vocab.json": b'{"a": 0}',
        "merges.txt": b"#version: 0.2\na b\n",
        "tokenizer.json": (tmp_path / "hf" / "tokenizer.json").read_bytes(),
    }
    beside(tmp_path / "hf", files)
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    assert read(tmp_path / "dcp" / "assets", files) == files
    last = "dcp"
    if family_of(name) != "qwen3":
        report = convert(tmp_path / "dcp", tmp_path / "meta", to="meta")
        assert read(tmp_path / "meta", files) == files
        assert any(
            "tokenizer.json is copied without a translation" in remark for remark in report.remarks
        )  # GPT-2's cut
        assert not (tmp_path / "meta" / "tokenizer.model").exists()
        last = "meta"
    convert(tmp_path / last, tmp_path / "back", to="hf")
    assert read(tmp_path / "back", files) == files
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, [257, 255])
    assert GenerationConfig.from_pretrained(tmp_path / "back").temperature == 0.6


def test_a_llama2_release_of_meta_opens_in_transformers(meta_llama2, tmp_path):
    """SentencePiece alone: ids are reported, the file is copied, transformers opens the folder, also through DCP."""
    write_tiny(tmp_path / "first", "llama2", numbers={"vocab_size": ROWS})
    convert(tmp_path / "first", tmp_path / "meta", to="meta")
    for name in ("titan_model.json", "titan_manifest.json", "generation_config.json"):
        (tmp_path / "meta" / name).unlink(missing_ok=True)
    shutil.copy(meta_llama2, tmp_path / "meta")
    convert(tmp_path / "meta", tmp_path / "dcp", to="dcp")
    report = convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    assert {"tokenizer.model", "tokenizer.json", "tokenizer_config.json"} <= set(report.other_files)
    assert not any("tokenizer" in remark for remark in report.remarks)
    assert read(tmp_path / "hf", ["tokenizer.model"]) == {"tokenizer.model": meta_llama2.read_bytes()}
    for output in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / "hf" / output).read_text())
        assert (content["bos_token_id"], content["eos_token_id"]) == (1, 2)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(meta_llama2))
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").encode(" a  b") == [1, *theirs.encode(" a  b")]


def test_a_release_of_meta_opens_with_what_was_made_of_tokenizer_json(trained, tmp_path, monkeypatch):
    write_tiny(tmp_path / "hf", "llama3", numbers={"vocab_size": ROWS})
    write(tmp_path / "hf", trained)
    report = convert(tmp_path / "hf", tmp_path / "meta", to="meta")
    assert "tokenizer.model" in report.other_files and not any("tokenizer" in remark for remark in report.remarks)
    ours = judge(tmp_path / "meta" / "tokenizer.model", {}, monkeypatch)
    theirs = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert ours.encode(THIS_FILE[:3000]) == theirs.encode(THIS_FILE[:3000]).ids
    dry = convert(tmp_path / "hf", tmp_path / "other", to="meta", dry_run=True)
    assert not (tmp_path / "other").exists() and not any("tokenizer" in remark for remark in dry.remarks)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_a_tokenizer_config_that_is_there_stays(begins, ends, meta_llama2, trained, tmp_path):
    """With it transformers reads the SentencePiece file as before, and titan the same."""
    own = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    own |= {"add_bos_token": begins, "add_eos_token": ends}
    places = [tmp_path / "theirs", tmp_path / "ours"]
    for place in places:
        place.mkdir()
        shutil.copy(meta_llama2, place)
        (place / "tokenizer_config.json").write_text(json.dumps(own))
    assert write_for_hf(places[1], find_assets(places[1]), vocab_size=ROWS, max_seq_len=64) == []
    assert json.loads((places[1] / "tokenizer_config.json").read_text()) == own
    theirs, ours = AutoTokenizer.from_pretrained(places[0]), load_tokenizer(places[1])
    for text in texts(300):
        ids = [*ours.prefix_ids, *ours.encode(text, special=True), *ours.suffix_ids]
        assert theirs.encode(text) == ids


@pytest.mark.parametrize("made_by", ["4.57.1", "5.0.0", None])
@pytest.mark.parametrize("model_type", ["mistral", "llama"])
def test_a_pattern_that_transformers_replaces_is_refused_by_name(tmp_path, made_by, model_type):
    vocab = {letter: id for id, letter in enumerate(BYTE_LETTERS.values())}
    vocab |= {f"filler {n}": len(vocab) + n for n in range(100_001 - len(vocab))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    pattern = pre_tokenizers.Split(Regex(r"\S+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pattern, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "fix_mistral_regex": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    described = {"model_type": model_type} | ({"transformers_version": made_by} if made_by else {})
    (tmp_path / "config.json").write_text(json.dumps(described))
    theirs = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.pre_tokenizer
    is_replaced = theirs.__getstate__() != tokenizer.pre_tokenizer.__getstate__()
    assert is_replaced == (model_type == "mistral" and made_by != "5.0.0")
    if not is_replaced:
        load_tokenizer(tmp_path)
        return
    with pytest.raises(UnsupportedError, match="fix_mistral_regex"):
        load_tokenizer(tmp_path)
