"""Text of tokens as they come: the pieces are what the tokenizer decodes from all, and no stop string is in them."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.tokenizers.tokenizer import load_tokenizer
from titan_tools.infer.text.text_stream import TextStream
from titan_tools.infer.text.vocabulary import Vocabulary
from trainer.data.train_tokenizer import train_ranks, write_tokenizer

WORDS = "the aab aaab \ufffd stop stops  STOP\n\n    return x\tnaïve 東京 👍🏽 e\u0301 user: assistant: , . 'll"
FORMS = (
    "tiktoken",
    "byte-level json",
    "llama 2 json",
    "metaspace json",
    "word piece json",
    "sentencepiece",
    "trimming",
)


def write_json_form(path: Path, decoder, tokens) -> None:
    from tokenizers import Tokenizer, models, normalizers

    vocab = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path))


def write_sentencepiece(prefix: Path, **changes) -> None:
    from sentencepiece import SentencePieceTrainer

    text = prefix.with_suffix(".txt")
    text.write_text("\n".join([WORDS.replace("\n", " ")] * 20 + [Path(__file__).read_text("utf-8")]), encoding="utf-8")
    output = {"input": str(text), "model_prefix": str(prefix), "minloglevel": 2, "num_threads": 1}
    SentencePieceTrainer.train(**output, model_type="bpe", byte_fallback=True, vocab_size=600, **changes)


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    """One of each kind that llama and qwen folders hold, and some more that a tokenizer.json can be."""
    from tokenizers import decoders

    root = tmp_path_factory.mktemp("tokenizers")
    places = {form: root / form for form in FORMS}
    for place in places.values():
        place.mkdir()
    write_tokenizer(places["tiktoken"], train_ranks([WORDS] * 3, vocab_size=300))
    (places["tiktoken"] / "tokenizer.json").rename(places["byte-level json"] / "tokenizer.json")
    marked = [word.replace(" ", "▁") for word in (" ", "  ", " a", " aab", "b", "a", "aa", " the", "東", "\ufffd", "x")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *marked]
    llama2 = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1, right=0),
    ]
    write_json_form(places["llama 2 json"] / "tokenizer.json", decoders.Sequence(llama2), pieces)
    write_json_form(places["metaspace json"] / "tokenizer.json", decoders.Metaspace(), pieces)
    write_json_form(
        places["word piece json"] / "tokenizer.json",
        decoders.WordPiece(),
        ["<unk>", "a", "##a", "##b", "aab", ".", "'s"],
    )
    write_sentencepiece(places["sentencepiece"] / "tokenizer", add_dummy_prefix=True, remove_extra_whitespaces=False)
    write_sentencepiece(places["trimming"] / "tokenizer", user_defined_symbols=["<|im|>"])
    return {
        form: Vocabulary(t := load_tokenizer(place), frozenset(), (), t.byte_values) for form, place in places.items()
    }


def stream(vocabulary, tokens, stop_strings=(), *, stop_ids=(), after=()):
    """All pieces, and after how many tokens it stopped, as `generate` uses it. Never more than is sure."""
    one = TextStream(vocabulary, stop_ids, stop_strings, after=after)
    pieces = []
    for token in tokens:
        pieces.append(one.add(token))
        assert one.text == "".join(pieces)
        if one.stopped or token in stop_ids:
            break
    num = len(pieces)
    pieces.append(one.finish())
    assert one.finish() == "" and not (one.stopped and one.add(5)) and one.text == "".join(pieces)
    return pieces, num


def plainly(vocabulary, tokens, stop_strings):
    """Text and number of tokens, all of them decoded after each."""
    whole = ""
    for num in range(len(tokens) + 1):
        whole = vocabulary.decode(tokens[:num])
        if ends := [whole.index(stop) for stop in stop_strings if stop in whole]:
            return whole[: min(ends)], num
    return whole, len(tokens)


def some_tokens(vocabulary):
    """Ids of all kinds, also ones that no tokenizer knows; and those of text, cut anywhere."""
    size = vocabulary.tokenizer.vocab_size
    ids = st.one_of(st.integers(0, size + 20), st.integers(0, 3), st.integers(size - 15, size - 1))
    text = st.lists(st.sampled_from([*WORDS.split(" "), " ", "\n", "東", "a", "b"]), max_size=12).map("".join)
    known = text.map(vocabulary.tokenizer.encode).flatmap(lambda ids: st.integers(0, 2).map(lambda n: ids[n:]))
    return st.lists(st.one_of(st.lists(ids, max_size=6), known), max_size=5).map(lambda parts: sum(parts, []))


STOPS = st.lists(
    st.one_of(
        st.sampled_from(
            ["aab", "aaab", "ab", "stop", "stops", "\n\n", "\n", " ", "the ", "東京", "</s>", "é", "👍", "user:"]
        ),
        st.text("ab \n東", min_size=1, max_size=4),
    ),
    max_size=3,
).map(tuple)


def check_pieces(vocabulary, *, max_examples):
    @settings(max_examples=max_examples, deadline=None, derandomize=True)
    @given(tokens=some_tokens(vocabulary), stop_strings=STOPS)
    def holds(tokens, stop_strings):
        pieces, num = stream(vocabulary, tokens, stop_strings)
        assert ("".join(pieces), num) == plainly(vocabulary, tokens, stop_strings)

    holds()


@pytest.mark.parametrize("form", FORMS)
def test_pieces_are_the_text_of_all_tokens_up_to_the_first_stop_string(vocabularies, form):
    check_pieces(vocabularies[form], max_examples=60)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_pieces_are_the_text_of_all_tokens_in_many_more_examples(vocabularies, form):
    check_pieces(vocabularies[form], max_examples=2000)


@pytest.mark.parametrize("form", FORMS[:3] + FORMS[5:])
def test_behind_a_prompt_the_pieces_are_what_it_grows_by(vocabularies, form):
    """Llama 2's tokenizer drops a space at the beginning of a text, but an answer is not its beginning."""
    vocabulary, encode = vocabularies[form], vocabularies[form].tokenizer.encode
    for prompt in ("the", "a\n", "aab 東", "stop:\n\n"):
        for answer in (" the stop", "x", "   return", "\n", "東京\n\n a", "\ufffd a"):
            after, tokens = encode(prompt), encode(prompt + answer)
            if tokens[: len(after)] != after:
                tokens = after + encode(answer)
            whole, before = vocabulary.decode(tokens), vocabulary.decode(after)
            assert whole.startswith(before)
            pieces, _ = stream(vocabulary, tokens[len(after) :], after=after)
            assert "".join(pieces) == whole[len(before) :]
    if form == "sentencepiece":
        tokens = encode("the")
        assert "".join(stream(vocabulary, tokens)[0]) == "the"
        assert "".join(stream(vocabulary, tokens, after=encode("x"))[0]) == " the"


@pytest.fixture
def by_bytes(tmp_path):
    """A vocabulary in which a token is a byte, and its `encode`."""
    from tests.models.llama import EOS, write_tokenizer

    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    return Vocabulary(tokenizer, frozenset([EOS])), tokenizer.encode


def test_text_comes_at_once_where_no_stop_string_can_begin(by_bytes):
    vocabulary, encode = by_bytes
    text = "a plain\ntext"
    assert stream(vocabulary, encode(text))[0] == [*text, ""]
    assert stream(vocabulary, encode(text), ("xx", "tt"))[0] == [*"a plain\n", "", "te", "", "x", "t"]


@pytest.mark.parametrize(
    "text, stop_strings, pieces, num",
    [
        ("aaab-", ("aab",), ["", "", "a", "", ""], 4),  # overlaps itself
        ("aabaaaa", ("aaaa",), ["", "", "aab", "", "", "", "", ""], 7),
        ("stopping", ("stops", "stopped"), ["", "", "", "", "", "stoppi", "n", "g", ""], 8),  # a common beginning
        ("stops", ("stops", "stop"), ["", "", "", "", ""], 4),
        ("xstop", ("top", "stop"), ["x", "", "", "", "", ""], 5),  # the earlier one of two that end together
        ("ab", ("abc",), ["", "", "ab"], 2),  # what only might have become one is said in the end
        ("é東.", ("東!",), ["", "é", "", "", "", "東.", ""], 6),
        ("é東!", ("東",), ["", "é", "", "", "", ""], 5),
    ],
)
def test_nothing_of_a_stop_string_is_said(by_bytes, text, stop_strings, pieces, num):
    vocabulary, encode = by_bytes
    assert stream(vocabulary, encode(text), stop_strings) == (pieces, num)


def test_a_stop_string_may_begin_and_end_within_tokens(vocabularies):
    vocabulary = vocabularies["tiktoken"]
    tokens = vocabulary.tokenizer.encode("the stops: return x")
    assert len(tokens) < 15  # letters come several at a time
    assert "".join(stream(vocabulary, tokens, ("ops: re",))[0]) == "the st"


def test_unfinished_letters_wait_and_are_replaced_in_the_end(by_bytes):
    vocabulary, encode = by_bytes
    east, thumb = encode("東"), encode("👍")
    assert stream(vocabulary, [*east, *thumb])[0] == ["", "", "東", "", "", "", "👍", ""]
    assert stream(vocabulary, [*encode("a"), *thumb[:3]])[0] == ["a", "", "", "", "\ufffd"]
    assert stream(vocabulary, [*thumb[:2], *east])[0] == ["", "", "", "", "\ufffd東", ""]
    invalid = thumb[1:2] * 40  # continues nothing
    pieces, _ = stream(vocabulary, invalid)
    assert "".join(pieces) == "\ufffd" * 40 and pieces[-1] == "\ufffd" * 3 and pieces[3] == "\ufffd"


def test_a_replacement_character_of_the_model_is_kept(by_bytes):
    vocabulary, encode = by_bytes
    assert "".join(stream(vocabulary, encode("a\ufffdb\ufffd"))[0]) == "a\ufffdb\ufffd"
    pieces, num = stream(vocabulary, encode("a\ufffdb"), ("\ufffd",))
    assert "".join(pieces) == "a"


def test_ids_without_a_token_are_replaced(by_bytes):
    vocabulary, encode = by_bytes
    east = encode("東")
    pieces, _ = stream(vocabulary, [300, *encode("a"), *east[:1], 300, *east, 299])
    assert "".join(pieces) == "\ufffda\ufffd\ufffd東\ufffd"
    assert "".join(stream(vocabulary, [300] * 50)[0]) == "\ufffd" * 50


def test_special_tokens_are_said_but_for_the_stop_token(by_bytes):
    from tests.models.llama import BOS, EOS

    vocabulary, encode = by_bytes
    tokens = [*encode("a"), BOS, EOS, *encode("b"), EOS]
    assert stream(vocabulary, tokens, stop_ids={EOS}) == (["a", "<|begin_of_text|>", "", ""], 3)
    ignoring = "".join(stream(vocabulary, tokens)[0])
    assert ignoring == "a<|begin_of_text|><|end_of_text|>b<|end_of_text|>"


def test_a_byte_that_is_a_token_stops_at_once(vocabularies):
    """Llama 2's line end. Until the next token it could still be part of no text, but the answer ends there."""
    vocabulary = vocabularies["llama 2 json"]
    line_end = vocabulary.tokenizer.encode("\n")[-1:]
    a = vocabulary.tokenizer.encode(" a")[-1:]
    assert stream(vocabulary, [*a, *line_end, *a], ("\n",)) == (["a", "", ""], 2)
    assert stream(vocabulary, [*a, *line_end, *line_end, *a])[0] == ["a", "", "", "\n\na", ""]


def test_a_run_of_bytes_that_turns_out_to_be_no_text_was_not_said(vocabularies):
    vocabulary = vocabularies["llama 2 json"]
    id_of = {value: id for id, value in vocabulary.byte_values.items()}
    tokens = [id_of[0x0A], id_of[0xFF]]
    assert vocabulary.decode(tokens) == "\ufffd\ufffd"
    assert stream(vocabulary, tokens, ("x\n",))[0] == ["", "", "\ufffd\ufffd"]


def test_spaces_are_dropped_at_the_beginning_alone(vocabularies):
    """By a SentencePiece model that drops all of them there, so that one as context would drop those behind it."""
    vocabulary = vocabularies["trimming"]
    space, the, x = (vocabulary.tokenizer._pieces.piece_to_id(piece) for piece in ("▁", "▁the", "x"))
    assert stream(vocabulary, [space, space, the, x])[0] == ["", "", "the", "x", ""]
    assert stream(vocabulary, [x, space, the, space, space, the])[0] == ["x", " ", " the", " ", " ", " the", ""]


@pytest.mark.parametrize("form", ["tiktoken", "byte-level json", "llama 2 json", "sentencepiece"])
@pytest.mark.parametrize("kind", ["text", "no text", "line ends", "unknown ids"])
def test_work_per_token_does_not_grow(vocabularies, form, kind):
    vocabulary, num = vocabularies[form], 1000
    encode, size = vocabulary.tokenizer.encode, vocabulary.tokenizer.vocab_size
    broken = encode("👍")[-3:-1]
    units = {"text": encode(" the naïve 東京"), "no text": broken, "line ends": encode("\n"), "unknown ids": [size + 1]}
    tokens = (units[kind] * num)[:num]
    num_decoded = 0

    class Counting:
        def __getattr__(self, name):
            return getattr(vocabulary.tokenizer, name)

        def decode(self, ids):
            nonlocal num_decoded
            num_decoded += len(ids)
            return vocabulary.tokenizer.decode(ids)

    counting = Vocabulary(Counting(), frozenset(), (), vocabulary.byte_values)
    assert "".join(stream(counting, tokens, ("never said",))[0]) == vocabulary.decode(tokens)
    assert num_decoded <= (4 if kind == "text" else 60) * num
