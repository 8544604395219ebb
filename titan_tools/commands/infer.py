"""titan infer: what does this checkpoint say?"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from titan_tools.commands.convert_options import ModelFrom


class _DType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def infer(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A DCP folder, a run's folder (its newest whole step), an HF folder, or Meta's original one.",
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
    tp: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tensor-parallel ranks to start. Default: 1, or the size of the launch.", show_default=False
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Default: 128, or what the context leaves after the prompt.", show_default=False),
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
    model_from: ModelFrom = None,
    seed: Annotated[int, typer.Option(help="Of the sampling; the same tokens at any --tp.")] = 0,
    dtype: Annotated[
        _DType | None, typer.Option(help="To compute in. Default: the checkpoint's own.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout: results and stats.")] = False,
) -> None:
    """Generate text from a checkpoint of any format, without converting it.

    \b
    Examples:
      titan infer outputs/debug --prompt "def main(" --max-new-tokens 32
      titan infer outputs/debug --tp 2 --prompt "import os" --temperature 0.8 --top-p 0.95 --seed 7 --json

    Each rank reads only its slices. Sizes, tokenizer and stop tokens come from the checkpoint.
    """
    from titan_tools.console import note, print_json
    from titan_tools.infer.prompts import read_prompt
    from titan_tools.infer.report import describe
    from titan_tools.infer.run import Request, infer
    from titan_tools.infer.sampling import Sampling

    told = infer(
        Request(
            checkpoint,
            read_prompt(text=prompt, file=prompt_file, source=source),
            Sampling(temperature, top_k, top_p, seed),
            tp=tp,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            model_from=model_from,
            as_json=as_json,
        )
    )
    if told is None:
        return
    if as_json:
        print_json(told)
        return
    print(told["results"][0]["text"], flush=True)
    note(describe(told["stats"]))
