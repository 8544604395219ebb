"""The checkpoint's tokenizer and ends: found in every format, and refused where they belong to another model (I3)."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from converters.common.errors import CheckpointError
from converters.formats.base import OutputOptions
from converters.model.model_info import read_model_info
from tests.doors import convert
from tests.models.llama import BOS, EOS, write_meta, write_tokenizer
from tests.models.llama import write as write_llama
from tests.tiny_sentencepiece import write_sentencepiece
from titan_tools.infer.find import find_tokenizer
from titan_tools.infer.text.vocabulary import read_vocabulary
from trainer.data.train_tokenizer import train_ranks
from trainer.data.train_tokenizer import write_tokenizer as write_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
GENERATION = "generation_config.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, hidden_size=16, intermediate_size=24, num_hidden_layers=1, rope_scaling=None)
    return folder


@pytest.fixture
def hf(written, tmp_path):
    """A folder to change."""
    return shutil.copytree(written, tmp_path / "hf")


def read(folder):
    return read_vocabulary(find_tokenizer(folder, None, {}), read_model_info(folder))


def change(path, **values):
    """Set what a JSON file says; None takes a key out."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("said, ends", [(EOS, {EOS}), ([EOS], {EOS}), ([EOS, 5, 300], {EOS, 5, 300}), ([], set())])
def test_the_generation_config_says_the_ends(hf, said, ends):
    change(hf / GENERATION, eos_token_id=said)
    assert read(hf).stop_ids == ends


def ends_of_generate(folder):
    """Where transformers' own generation would end."""
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    return {*(found if isinstance(found, list) else [found])} - {None}


def test_who_says_the_ends_where_the_generation_config_does_not(hf):
    change(hf / "config.json", eos_token_id=7)
    change(hf / GENERATION, eos_token_id=None)
    assert read(hf).stop_ids == {EOS} and ends_of_generate(hf) == set()  # the tokenizer's name is better than no end
    (hf / GENERATION).unlink()
    for said in (7, [7, 8]):
        change(hf / "config.json", eos_token_id=said)
        assert read(hf).stop_ids == ends_of_generate(hf) == {*([said] if said == 7 else said)}
    change(hf / "config.json", eos_token_id=2)  # LlamaConfig's default, which nobody set
    assert read(hf).stop_ids == {EOS}
    (hf / "tokenizer_config.json").unlink()
    assert read(hf).stop_ids == ends_of_generate(hf) == {2}
    change(hf / "config.json", eos_token_id=None)
    assert read(hf).stop_ids == ends_of_generate(hf) == set()


def test_what_generation_begins_with_where_there_is_no_text(hf):
    """`generate` without a prompt: the generation config's id, else config.json's; else what the tokenizer names."""
    described = json.loads((hf / "tokenizer.json").read_text())
    (hf / "tokenizer.json").write_text(json.dumps(described | {"post_processor": None}))
    change(hf / "config.json", bos_token_id=8)
    change(hf / GENERATION, bos_token_id=9)
    assert (read(hf).prefix, read(hf).begin) == ((), (9,))
    (hf / GENERATION).unlink()
    assert read(hf).begin == (8,)
    change(hf / "config.json", bos_token_id=None)
    assert read(hf).begin == (BOS,)
    change(hf / "tokenizer_config.json", bos_token=None)
    assert read(hf).begin == ()
    change(hf / "config.json", bos_token_id="x")
    with pytest.raises(CheckpointError, match="begin-of-text token .* must be token ids"):
        read(hf)


@pytest.mark.parametrize("said", ["<|end_of_text|>", [EOS, "x"], [True], 1.5, [[EOS]]])
def test_ends_that_are_no_ids_are_reported(hf, said):
    change(hf / GENERATION, eos_token_id=said)
    with pytest.raises(CheckpointError, match="stop tokens .* must be token ids"):
        read(hf)


@pytest.mark.parametrize("said, strings", [(None, ()), ("User:", ("User:",)), (["a", "\n\n"], ("a", "\n\n")), ([], ())])
def test_stop_strings_of_the_generation_config(hf, said, strings):
    change(hf / GENERATION, stop_strings=said)
    assert read(hf).stop_strings == strings


@pytest.mark.parametrize("said", [3, "", [""], ["a", 3], ["a", None], {"a": "b"}, True])
def test_stop_strings_that_are_no_text_are_reported(hf, said):
    change(hf / GENERATION, stop_strings=said)
    with pytest.raises(CheckpointError, match=r"generation_config.json: stop_strings is .* text or a list of texts"):
        read(hf)


def test_every_format_has_the_same_ends(hf, tmp_path):
    write_ranks(hf, train_ranks(["some text for a merge or two"], vocab_size=270))  # torchtune opens no other kind
    change(hf / GENERATION, eos_token_id=[261, 9], stop_strings=["User:"])
    convert(hf, tmp_path / "dcp", to="dcp")
    for style in ("hf", "meta", "torchtune"):
        convert(tmp_path / "dcp", tmp_path / f"torchtune {style}", to="torchtune", options=OutputOptions(style=style))
    convert(tmp_path / "dcp", tmp_path / "again", to="hf")
    convert(tmp_path / "dcp", tmp_path / "meta", to="meta")
    for place in ("hf", "dcp", "meta", "torchtune hf", "torchtune meta", "torchtune torchtune", "again"):
        vocabulary = read(tmp_path / place)
        assert (vocabulary.stop_ids, vocabulary.stop_strings) == ({261, 9}, ("User:",))
        assert vocabulary.prefix == vocabulary.begin == (260,)


def test_a_tokenizer_from_elsewhere_says_the_ends_with_the_checkpoints_generation_config(hf, tmp_path):
    shutil.copytree(hf, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (hf / name).unlink()
    change(hf / GENERATION, eos_token_id=[EOS, 9], stop_strings="User:")
    vocabulary = read_vocabulary(tmp_path / "elsewhere", read_model_info(hf))
    assert (vocabulary.stop_ids, vocabulary.stop_strings) == ({EOS, 9}, ("User:",))
    (hf / GENERATION).unlink()
    assert read_vocabulary(tmp_path / "elsewhere", read_model_info(hf)).stop_ids == {EOS}  # config.json's


@pytest.fixture
def meta(written, tmp_path):
    """A Meta folder without a tokenizer, and where to put one."""
    from transformers import LlamaForCausalLM

    write_meta(tmp_path / "meta", LlamaForCausalLM.from_pretrained(written))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "meta" / name).unlink()
    return tmp_path / "meta"


def test_a_llama_3_of_meta_ends_with_a_text_a_message_or_a_turn(meta, tmp_path):
    (tmp_path / "ranks").mkdir()
    write_ranks(tmp_path / "ranks", train_ranks(["some text for a merge or two"], vocab_size=270))
    shutil.copy(tmp_path / "ranks" / "tokenizer.model", meta)
    vocabulary = read(meta)
    ends = {vocabulary.decode([id]) for id in vocabulary.stop_ids}
    assert ends == {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}
    assert vocabulary.decode([*vocabulary.prefix]) == "<|begin_of_text|>"


def test_a_llama_2_of_meta_ends_with_its_own_token(meta):
    write_sentencepiece(meta / "tokenizer.model")
    vocabulary = read(meta)
    assert (vocabulary.stop_ids, vocabulary.prefix, vocabulary.decode([2])) == ({2}, (1,), "</s>")


def test_a_missing_tokenizer_is_reported(hf):
    """I3."""
    (hf / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="there is no tokenizer in") as caught:
        read(hf)
    assert str(hf) in caught.value.message and "--model-from" in caught.value.tries[0]
    (hf / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        read(hf)


def test_a_tokenizer_of_another_model_is_reported_with_both_sizes(tmp_path):
    """I3: the vocabulary goes beyond the embedding's rows."""
    write_llama(tmp_path, vocab_size=250, hidden_size=16, intermediate_size=24, num_hidden_layers=1, eos_token_id=2)
    with pytest.raises(CheckpointError, match=r"256 tokens, the model's embedding 250 rows"):
        read(tmp_path)


def test_added_tokens_without_a_row_are_refused_only_in_a_text(hf, titan):
    """A padding token that the model was not resized for, as in many fine-tuned Llama 2."""
    first = len(AutoTokenizer.from_pretrained(hf))
    listed = {str(first + n): {"content": f"<pad{n}>", "special": True} for n in range(301 - first + 1)}
    listed[str(first)]["content"] = "<|im_start|>"
    last = f"<pad{301 - first}>"
    template = "<|im_start|>{{ messages[-1].content }}{% if messages[0].content == 'x' %}" + last + "{% endif %}"
    change(hf / "tokenizer_config.json", added_tokens_decoder=listed, chat_template=template)
    assert AutoTokenizer.from_pretrained(hf).convert_tokens_to_ids(last) == 301
    new = ["--max-new-tokens", "1"]
    for options in (new, ["--score"], ["--chat", *new]):  # it is text
        assert titan("infer", hf, "--prompt", f"a{last}", *options)[0] == 0
    for prompt, *options in (
        (f"a{last}", "--special-tokens", *new),
        (f"a{last}", "--special-tokens", "--score"),
        ("x", "--chat", *new),
    ):
        code, _, errors = titan("infer", hf, "--prompt", prompt, *options)
        assert code == 2 and f"301 rows, and none for tokens of the text: {last} (301)" in errors


@pytest.mark.parametrize("wrong", [{"eos_token_id": [EOS, 301]}, {"bos_token_id": 301}, {"eos_token_id": -1}])
def test_special_ids_beyond_the_embedding_are_reported(hf, wrong):
    """I3."""
    change(hf / GENERATION, **wrong)
    with pytest.raises(CheckpointError, match=r"special token ids \[(301|-1)\] .* 301 rows"):
        read(hf)


def test_what_is_shown_of_ids(hf):
    vocabulary = read(hf)
    a, b = vocabulary.tokenizer.encode("ab")
    assert vocabulary.decode([]) == ""
    assert vocabulary.decode([a, BOS, EOS, b]) == "a<|begin_of_text|><|end_of_text|>b"
    assert vocabulary.decode([a, 258, 300, b, 299]) == "a\ufffd\ufffdb\ufffd"  # rows without a token


def test_an_id_that_a_tokenizer_json_leaves_out_is_shown_too(tmp_path):
    write_llama(tmp_path, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    write_tokenizer(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    (letter,) = (name for name, id in described["model"]["vocab"].items() if id == 200)
    del described["model"]["vocab"][letter]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    vocabulary = read(tmp_path)
    (a,) = vocabulary.tokenizer.encode("a")
    assert vocabulary.decode([a, 200, a]) == "a\ufffda"
