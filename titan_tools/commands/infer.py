"""titan infer: what does this checkpoint say?"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from titan_tools.commands.convert_options import ModelFrom


class _DType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class _Quantize(StrEnum):
    int8 = "int8"
    float8 = "float8"


class _Truncate(StrEnum):
    left = "left"


def infer(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A DCP folder, a run's folder (its newest whole step), an HF folder or cache snapshot, Meta's "
            "original one, torchtune's, or a torch file.",
            show_default=False,
        ),
    ],
    source: Annotated[
        str | None, typer.Argument(metavar="-", help="- reads the prompt from standard input.", show_default=False)
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 text, taken as it is, line ends included.", show_default=False),
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
            help="Results of --batch, a JSON line each; ids that it holds already are skipped. Default: stdout.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Prompts are a user's messages, in the checkpoint's chat template; without one, talk."
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system message of a chat.", show_default=False)
    ] = None,
    score: Annotated[
        bool, typer.Option("--score", help="Log-likelihood and perplexity of the prompts; nothing is generated.")
    ] = False,
    truncate: Annotated[
        _Truncate | None,
        typer.Option(help="Let prompts that do not fit the context lose their beginning.", show_default=False),
    ] = None,
    from_bos: Annotated[
        bool, typer.Option("--from-bos", help="Let an empty prompt be the begin-of-text token alone.")
    ] = False,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Read special tokens written in a prompt as such, not as text.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Default: 128, or what the context leaves after the prompt.", show_default=False),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be given again.", show_default=False),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the checkpoint's stop tokens.")] = False,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens a conversation may hold (default: the model's, at most 8192), or of the windows that --score "
            "reads (default: the model's).",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the K likeliest tokens. Default: all.", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the fewest tokens that hold this much probability. Default: all.", show_default=False
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Leave out tokens less likely than this share of the likeliest. Default: none.", show_default=False
        ),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divides the logits of tokens that were there before; 1 is none.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling; the same tokens at any --tp and --batch-size.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="K", help="Tell each token's log-probability and the K likeliest.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout: results and stats.")] = False,
    tp: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tensor-parallel ranks to start. Default: 1, or the size of the launch.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        _DType | None,
        typer.Option(
            help="To compute in. Default: the checkpoint's own; with --quantize bfloat16.", show_default=False
        ),
    ] = None,
    quantize: Annotated[
        _Quantize | None, typer.Option(help="Hold the weights in 8 bits. Default: as computed in.", show_default=False)
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the decode step: a slow start, then faster.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences at a time. Default: 8 on a CPU, 32 on a GPU.", show_default=False),
    ] = None,
    model_from: ModelFrom = None,
    request: Annotated[
        Path | None, typer.Option(hidden=True, help="For ranks: what was asked of the first process.")
    ] = None,
) -> None:
    """Generate text from a checkpoint of any format, without converting it.

    \b
    Examples:
      titan infer outputs/debug --prompt "def main(" --max-new-tokens 32
      titan infer outputs/debug --tp 2 --prompt "import os" --temperature 0.8 --top-p 0.95 --seed 7 --json
      titan infer outputs/debug --batch prompts.jsonl --out answers.jsonl
      titan infer Llama-3.1-8B-Instruct --chat
      titan infer outputs/debug --score --prompt-file README.md

    Each rank reads only its slices. Sizes, tokenizer, chat template and stop tokens come from the checkpoint.
    """
    from dataclasses import replace

    from titan_tools.infer.decoding.sampling import Sampling
    from titan_tools.infer.request import Request, load_request
    from titan_tools.infer.run import infer
    from titan_tools.infer.text.prompts import read_prompt

    if request is not None:
        infer(replace(load_request(request), checkpoint=checkpoint, tp=tp))
        return
    infer(
        Request(
            checkpoint,
            Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed),
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
            model_from=model_from,
        )
    )
