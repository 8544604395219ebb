"""Options of `titan infer` that do not go together, or have values that cannot be: reported before weights are read."""

import pytest

from tests.refusals import refusal_of

pytestmark = pytest.mark.usefixtures("one_thread")
REFUSED = {
    "float16 sums": (
        ("--prompt", "a", "--quantize", "int8", "--dtype", "float16"),
        "sums over 8-bit weights exceed 65504, float16's largest number\ntry: --dtype bfloat16\n",
    ),
    "no prompt": ((), "give a prompt: --prompt TEXT"),
    "two prompts": (("--prompt", "a", "-"), "give one prompt"),
    "stray argument": (("hello",), "only - (standard input) is allowed there"),
    "prompt file missing": (("--prompt-file", "/no/such"), "cannot read the prompt file /no/such"),
    "no new tokens": (("--prompt", "a", "--max-new-tokens", "0"), "--max-new-tokens"),
    "prompt and batch": (("--prompt", "a", "--batch", "in.jsonl"), "--batch has prompts of its own"),
    "option without its argument": (
        ("--prompt",),
        "Option '--prompt' requires an argument.\ntry: titan infer --help\n",
    ),
    "empty prompt beside a batch": (
        ("--prompt", "", "--batch", "in.jsonl"),
        "error: --batch has prompts of its own: leave the other prompt out\n",
    ),
    "somebody's request": (
        ("--request", __file__),
        f"error: --request {__file__}: not a file that titan wrote for its ranks",
    ),
    "no request": (("--request", "/no/such"), "error: --request /no/such: not a file that titan wrote for its ranks"),
    "out without batch": (
        ("--prompt", "a", "--out", "f"),
        "--out is the results file of a --batch\ntry: --batch FILE",
    ),
    "system without chat": (("--prompt", "a", "--system", "s"), "--system is a message of a --chat\ntry: --chat"),
    "empty stop": (("--prompt", "a", "--stop", ""), "--stop is empty"),
    "samples alike": (
        ("--prompt", "a", "--samples", "2"),
        "would all be equal: give --temperature\ntry: --temperature 1",
    ),
    "batch size of one": (("--prompt", "a", "--batch-size", "2"), "--batch-size is for a --batch, or for --samples"),
    "context of one": (("--prompt", "a", "--context", "99"), "--context is for a conversation"),
    "from-bos alone": (("--from-bos",), "give a prompt: --prompt TEXT, --prompt-file FILE, - for standard input"),
    "from-bos in a chat": (("--prompt", "a", "--chat", "--from-bos"), "--from-bos has no effect in a chat"),
    "special tokens in a chat": (
        ("--prompt", "a", "--chat", "--special-tokens"),
        "--special-tokens has no effect in a",
    ),
    "logprobs in text": (
        ("--prompt", "a", "--logprobs", "2"),
        "--logprobs cannot be shown in plain text\ntry: --json\n",
    ),
    "empty chat": (("--prompt", "", "--chat"), "the prompt is empty"),
    "conversation in JSON": (("--chat", "--json"), "--json has no effect in a conversation; give a prompt"),
    "score of nothing": (("--score",), "- for standard input, or --batch FILE\n"),
    "more than the context": (
        ("--prompt", "a", "--max-new-tokens", "255"),
        "at most 254 new tokens fit behind this prompt\ntry: --max-new-tokens 254\n",
    ),
    "score of a cut text": (
        ("--prompt", "a", "--score", "--truncate", "left"),
        "--truncate has no effect with --score",
    ),
    "tp beyond the heads": (("--prompt", "a", "--tp", "8"), "valid: 1, 2, 4"),
    "tp between": (("--prompt", "a", "--tp", "3"), "--tp 3 cannot split 4 attention heads and 2 key/value heads"),
    "dtype": (("--prompt", "a", "--dtype", "int4"), "int4"),
}


@pytest.mark.parametrize("arguments, said", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused(titan, hf, untouched, arguments, said):
    err = refusal_of(titan("infer", hf, *arguments), as_json="--json" in arguments)
    assert err.startswith("error: ") and said in err


def test_all_that_does_not_go_together_is_reported_at_once(titan, hf):
    options = ("--score", "--temperature", "-1", "--stop", "", "--max-new-tokens", "3", "--out", "x", "--system", "s")
    code, out, err = titan("infer", hf, "--prompt", "", *options, "--batch-size", "2")
    assert code == 2 and out == ""
    assert err.startswith(
        "error: 9 problems with these options:\n  the prompt is empty\n  --out is the results file of a --batch\n"
    )
    for name in ("--temperature", "--stop", "--max-new-tokens"):
        assert f"\n  {name} has no effect with --score, which generates no tokens\n" in err
    assert err.count("--batch-size") == 1
    assert "\n  --temperature is -1.0; it must be" in err and "\ntry: --batch FILE\n" in err
