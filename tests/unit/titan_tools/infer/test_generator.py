"""`load_for_inference`: generation from Python gives what `titan infer` prints."""

import json

import pytest

from converters.common.errors import CheckpointError, ConfigError
from tests.chat_templates import CHATML
from tests.models.llama import write as write_llama
from titan_tools.api import load_for_inference

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_llama(folder, chat_template=CHATML)
    return folder


def result_of(titan, *arguments):
    code, out, err = titan("infer", *arguments, "--json")
    assert code == 0, err
    return json.loads(out)["results"][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_tokens_and_messages_are_completed_as_by_the_command(titan, chat, dtype):
    generator = load_for_inference(chat, dtype=dtype)
    expected = result_of(titan, chat, "--prompt", "def main(", "--dtype", dtype, "--max-new-tokens", 9)
    text, streamed = generator.generate("def main(", max_new_tokens=9), []
    assert (text.tokens, text.text, text.finish_reason) == (
        expected["tokens"],
        expected["text"],
        expected["finish_reason"],
    )
    again = generator.generate(generator.encode("def main("), max_new_tokens=9, on_text=streamed.append)
    assert again.tokens == text.tokens and "".join(streamed) == text.text == generator.decode(text.tokens)
    answer = result_of(titan, chat, "--chat", "--prompt", "hello", "--dtype", dtype, "--max-new-tokens", 9)
    messages = [{"role": "user", "content": "hello"}]
    assert generator.generate(messages, max_new_tokens=9).tokens == answer["tokens"]


def test_sampling_options_are_those_of_the_command(titan, hf):
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 7}
    argv = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    expected = result_of(titan, hf, "--prompt", "a", "--max-new-tokens", 12, "--logprobs", 2, *argv)
    completion = load_for_inference(str(hf)).generate("a", max_new_tokens=12, logprobs=2, **options)
    assert completion.tokens == expected["tokens"]
    assert [one.token for one in completion.logprobs] == expected["tokens"]


def test_the_context_bounds_prompt_and_completion(hf):
    generator = load_for_inference(hf, context=20)
    assert len(generator.generate([1, 2, 3], ignore_eos=True).tokens) == 17
    with pytest.raises(ConfigError, match="do not fit the model's context of 20 tokens"):
        generator.generate([1, 2, 3], max_new_tokens=18)
    with pytest.raises(ConfigError, match="context is 1000; it must be from 2 to the model's 256 tokens"):
        load_for_inference(hf, context=1000)


@pytest.mark.parametrize("prompt", ["", [], [301], [-1], ["a"]])
def test_prompts_without_tokens_of_the_vocabulary_are_refused(hf, prompt):
    with pytest.raises(ConfigError):
        load_for_inference(hf).generate(prompt)


def test_messages_need_a_chat_template(hf):
    with pytest.raises(CheckpointError, match="no chat template"):
        load_for_inference(hf).generate([{"role": "user", "content": "hello"}])


def test_scores_are_those_of_the_command(titan, hf):
    generator, text = load_for_inference(hf), "def main(): " * 9
    expected = result_of(titan, hf, "--score", "--prompt", text)
    score = generator.score(text, num_top=1)
    assert score.sum.metrics() == pytest.approx({name: expected[name] for name in score.sum.metrics()})
    assert sum(one.logprob for one in score.logprobs) == pytest.approx(expected["logprob"], abs=1e-4)
    prompt, completion = generator.score("def "), generator.score("def ", completion="main(")
    assert completion.sum.num_bytes == 6 and prompt.text.completion is None
