"""The peers of infer.py, each in its own process: transformers' generate, and matrix products without a model.

python scripts/bench/infer_peers.py (transformers|bare) FOLDER DTYPE PROMPT_FILE NEW_TOKENS BATCH_SIZE

PROMPT_FILE is text, or a batch of prompts if its name ends in .jsonl.
"""

import json
import sys
import time
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from models import shapes_of  # noqa: E402

_TOP_K = "num_experts_per_tok"


def transformers(folder: Path, dtype: torch.dtype, prompt: str, num_new: int) -> dict[str, float]:
    """Greedy generation of one prompt in the first call; the times at which a streamer gets the tokens."""

    class Clock:
        def __init__(self) -> None:
            self.times = [time.perf_counter()]

        def put(self, _: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    model, tokenizer = _model_and_tokenizer(folder, dtype)
    clock = Clock()
    tokens = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    with torch.inference_mode():
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=num_new, streamer=clock
        )
    start, _, first, *_ = clock.times  # the second is the prompt itself
    later = clock.times[2:]
    gaps = [b - a for a, b in zip(later, later[1:], strict=False)]
    return {"ttft_ms": 1000 * (first - start), "tpot_ms": 1000 * mean(gaps), "prompt_tokens": tokens.shape[1]}


def transformers_batch(
    folder: Path, dtype: torch.dtype, prompts: list[str], num_new: int, batch_size: int
) -> dict[str, float]:
    """Greedy generation of many prompts, `batch_size` at a time, padded on the left: all new tokens per second."""
    model, tokenizer = _model_and_tokenizer(folder, dtype)
    started = time.perf_counter()
    for first in range(0, len(prompts), batch_size):
        rows = [tokenizer.encode(p, add_special_tokens=False).ids for p in prompts[first : first + batch_size]]
        longest = max(map(len, rows))
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=num_new)
    return {"tokens_per_sec": len(prompts) * num_new / (time.perf_counter() - started)}


def _model_and_tokenizer(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model without stop tokens, and its tokenizer."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def bare(folder: Path, dtype: torch.dtype, num_new: int) -> dict[str, float]:
    """All products with the weights that one token needs, one after another: the limit for calls of F.linear.

    Of experts, others in each layer and for each token.
    """
    config = json.loads((folder / "config.json").read_text())
    shapes = {name: shape for name, shape in shapes_of(config).items() if len(shape) == 2}
    if not config["tie_word_embeddings"]:  # else the embedding is the output
        del shapes["model.embed_tokens.weight"]
    weights = {name: torch.full(shape, 0.01, dtype=dtype) for name, shape in shapes.items()}
    inputs = {k: torch.randn(1, k).to(dtype) for _, k in shapes.values()}
    of_experts: dict[str, dict[str, list[torch.Tensor]]] = {}  # layer → expert → its weights
    for name in [name for name in weights if ".experts." in name]:
        layer, _, inside = name.partition(".experts.")
        of_experts.setdefault(layer, {}).setdefault(inside.partition(".")[0], []).append(weights.pop(name))
    random, secs = Random(0), []
    with torch.inference_mode():
        for _ in range(num_new):
            chosen = [e for layer in of_experts.values() for e in random.sample([*layer.values()], config[_TOP_K])]
            active = [*weights.values(), *(weight for expert in chosen for weight in expert)]
            started = time.perf_counter()
            for weight in active:
                F.linear(inputs[weight.shape[1]], weight)
            secs.append(time.perf_counter() - started)
    return {"tpot_ms": 1000 * mean(secs[1:])}


def main() -> None:
    what, folder, dtype, prompt, num_new, batch_size = sys.argv[1:]
    model, text = (Path(folder), getattr(torch, dtype)), Path(prompt).read_text()
    if what == "bare":
        output = bare(*model, int(num_new))
    elif prompt.endswith(".jsonl"):
        prompts = [json.loads(line)["prompt"] for line in text.splitlines()]
        output = transformers_batch(*model, prompts, int(num_new), int(batch_size))
    else:
        output = transformers(*model, text, int(num_new))
    print(json.dumps(output))


if __name__ == "__main__":
    main()
