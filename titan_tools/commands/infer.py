"""The `titan infer` command: signature, help and examples."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from converters.store.location import Location
from titan_tools.commands.convert_options import ModelFrom, Select, checkpoint_argument
from titan_tools.terminal.interrupts import exit_on_interrupt


class _ComputeDType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class _Quantize(StrEnum):
    int8 = "int8"
    float8 = "float8"
    stored = "stored"


class _Truncate(StrEnum):
    left = "left"


def infer(
    checkpoint: Annotated[
        Location,
        checkpoint_argument(
            "CHECKPOINT",
            "A DCP folder, a run's folder (its newest complete step), an HF folder, a model's name in the hub's cache, "
            "Meta's original folder, torchtune's, or a torch file.",
        ),
    ],
    source: Annotated[
        str | None,
        typer.Argument(metavar="STDIN", help="A dash (-) reads the prompt from standard input.", show_default=False),
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read the prompt from a file: UTF-8, taken as it is.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSON lines, each {"id": …, "prompt": …}; with --score also "completion", with --chat "messages".',
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the results of --batch here, a JSON line each; a rerun skips finished ids. Default: stdout.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Put prompts into the checkpoint's chat template as user messages; without a prompt, a conversation.",
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system message of a chat.", show_default=False)
    ] = None,
    score: Annotated[
        bool, typer.Option("--score", help="Print log-likelihood and perplexity of the prompts; nothing is generated.")
    ] = False,
    truncate: Annotated[
        _Truncate | None,
        typer.Option(
            metavar="left",
            help="left: drop the beginning of prompts that do not fit the context. Default: reject them.",
            show_default=False,
        ),
    ] = None,
    from_bos: Annotated[
        bool, typer.Option("--from-bos", help="Allow an empty prompt: the begin-of-text token alone.")
    ] = False,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Read special tokens written in a prompt as tokens, not as text.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Default: 128, in a conversation 1024 or a quarter of its context; never more than fits.",
            show_default=False,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop before this text; may be repeated.", show_default=False),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after the checkpoint's stop tokens.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Tokens of a conversation (default: the model's, at most 8192), or of the windows of --score "
            "(default: the model's).",
            show_default=False,
        ),
    ] = None,
    generation_config: Annotated[
        bool,
        typer.Option(
            "--generation-config",
            help="Follow the checkpoint's generation_config.json; options given here take precedence.",
        ),
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="0 is greedy. Default: 0.", show_default=False)
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(metavar="K", help="Sample from the K likeliest tokens. Default: all.", show_default=False),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Sample from the fewest tokens that hold this much probability. Default: all.",
            show_default=False,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Exclude tokens less likely than this share of the likeliest one. Default: 0.",
            show_default=False,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Divide the logits of tokens that occurred before; 1 is none. Default: 1.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the sampling; gives the same tokens at any --tp and --batch-size.")
    ] = 0,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Completions of each prompt; several need a --temperature.")
    ] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="K",
            help="With --json or --batch: each token's log-probability, and the K likeliest tokens.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: results and stats.")] = False,
    tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of tensor-parallel ranks. Default: 1, or torchrun's number of ranks.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        _ComputeDType | None,
        typer.Option(
            help="Dtype of the computation. Default: the checkpoint's own, if it is one of these, else float32; "
            "with --quantize bfloat16.",
            show_default=False,
        ),
    ] = None,
    quantize: Annotated[
        _Quantize | None,
        typer.Option(
            help="Round the weights of linear layers and experts to 8 bits; stored: keep a checkpoint's own float8 "
            "or mxfp4 weights. Default: off.",
            show_default=False,
        ),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the decode step: a slower start, then faster decoding.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Sequences that decode together. Default: 8 on a CPU, 32 on a GPU; fewer if its memory is short.",
            show_default=False,
        ),
    ] = None,
    select: Select = None,
    model_from: ModelFrom = None,
    ignore_memory: Annotated[
        bool,
        typer.Option("--ignore-memory", help="Start even if weights and cache alone exceed the available memory."),
    ] = False,
    request: Annotated[Path | None, typer.Option(hidden=True, help="Internal: the request file for ranks.")] = None,
) -> None:
    """Generate text from a checkpoint of any format, without converting it.

    \b
    Examples:
      titan infer outputs/debug --prompt "def main(" --max-new-tokens 32
      titan infer outputs/debug --tp 2 --prompt "import os" --temperature 0.8 --top-p 0.95 --seed 7 --json
      titan infer outputs/debug --batch prompts.jsonl --out answers.jsonl
      titan infer meta-llama/Llama-3.1-8B-Instruct --chat
      titan infer outputs/debug --score --prompt-file README.md

    Each rank reads only its slices. Sizes, tokenizer, chat template and stop tokens come from the checkpoint.
    """
    from dataclasses import replace

    with exit_on_interrupt():
        from titan_tools.infer.decoding.sampling import Sampling
        from titan_tools.infer.request import Request, load_request
        from titan_tools.infer.run import run_request
        from titan_tools.infer.text.prompts import read_prompt

    if request is not None:
        run_request(replace(load_request(request), checkpoint=checkpoint, tp=tp))
        return
    options = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "max_new_tokens": max_new_tokens,
    }  # fmt: skip
    penalty = 1.0 if repetition_penalty is None else repetition_penalty
    run_request(
        Request(
            checkpoint,
            Sampling(temperature or 0.0, top_k, top_p, min_p or None, penalty, seed),
            generation_config=generation_config,
            explicit=tuple(name for name, value in options.items() if value is not None),
            text=read_prompt(text=prompt, file=prompt_file, source=source),
            batch=batch,
            out=out,
            chat=chat,
            system=system,
            score=score,
            max_new_tokens=max_new_tokens,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            context=context,
            truncate=truncate,
            from_bos=from_bos,
            special_tokens=special_tokens,
            samples=samples,
            logprobs=logprobs,
            as_json=as_json,
            tp=tp,
            dtype=dtype,
            quantize=quantize,
            compile=compile,
            batch_size=batch_size,
            select=select,
            model_from=model_from,
            ignore_memory=ignore_memory,
        )
    )
