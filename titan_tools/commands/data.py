"""`titan data prepare`: turn text into a token index for training."""

from pathlib import Path
from typing import Annotated

import typer

from converters.store.location import Location
from titan_tools.commands.convert_options import checkpoint_option, local_path

data_app = typer.Typer(
    help="Prepare text for training.\n\n"
    "\b\nExamples:\n"
    "  titan data prepare --out data\n"
    "  titan data prepare notes/ c4-train.00000.json.gz --out data --tokenizer Llama-3.1-8B",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@data_app.callback()
def _keep_the_group() -> None:
    """Without a callback Typer would drop the name of a group's only command."""


@data_app.command("prepare", short_help="Turn text into a token index.")
def prepare(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SOURCE",
            help="Files (.txt, .md, .py, JSON lines also .gz and .zst, .parquet, .npy of token ids) and folders; "
            "default: the Python standard library.",
            parser=local_path,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Folder to write the index to.", parser=local_path)
    ] = Path("data"),
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", metavar="N", help="Vocabulary size of the tokenizer to train.")
    ] = 2048,
    tokenizer: Annotated[
        Location | None,
        checkpoint_option(
            "--tokenizer",
            metavar="FOLDER",
            help="Folder with the tokenizer to use instead of training one, or a model's name in the hub's cache.",
        ),
    ] = None,
    held_out: Annotated[
        float, typer.Option("--held-out", metavar="SHARE", help="Share of the text to keep for validation; 0: none.")
    ] = 0.02,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-bytes",
            metavar="N",
            help="Read at most this many bytes of text, in whole documents; only a longer first one is truncated.",
        ),
    ] = None,
    text_key: Annotated[
        str, typer.Option("--text-key", metavar="KEY", help="JSON key or Parquet column of the text.")
    ] = "text",
    special_tokens: Annotated[
        bool,
        typer.Option("--special-tokens", help="Read special tokens written in documents as tokens, not as text."),
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip and count documents that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing index.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Turn text into a token index: memory-mapped tokens, document offsets, a held-out part, and the tokenizer.

    Text is read from whole files, JSON lines or Parquet rows. A .npy file of token ids is used directly.

    \b
    Examples:
      titan data prepare --out data
      titan data prepare c4-train.00000.json.gz notes/ --out data --tokenizer Llama-3.1-8B --held-out 0.01
      titan data prepare chats.jsonl --out chats --tokenizer Qwen3-8B --special-tokens
      titan data prepare crawl/*.parquet --text-key content --skip-bad --tokenizer data --out more
    """
    from dataclasses import asdict

    from converters.source.open import local_folder
    from converters.tokenizers.assets import find_assets
    from converters.tokenizers.notes import tokenizer_notes
    from converters.tokenizers.tokenizer import document_ends, tokenizer_note
    from titan_tools.terminal.console import count, note, print_json
    from trainer.data.document_text import special_text_note
    from trainer.data.prepare import prepare as make

    existing = None
    if tokenizer is not None:
        existing = local_folder(tokenizer) if tokenizer.scheme else tokenizer.path
    report = make(
        sources or [],
        out,
        vocab_size=vocab_size,
        tokenizer=existing,
        held_out=held_out,
        max_bytes=max_bytes,
        text_key=text_key,
        special_tokens=special_tokens,
        skip_bad=skip_bad,
        overwrite=overwrite,
    )
    if existing and (text := tokenizer_note(existing)):
        note(text)
    for line in tokenizer_notes(find_assets(out)):
        note(line)
    if existing:
        note(document_ends(find_assets(out)).described)
    if text := special_text_note(report.special_tokens_as_text, "--special-tokens"):
        note(text)
    if as_json:
        print_json(asdict(report))
        return
    skipped = ""
    if report.skipped:
        because = "".join(f"\n                  {why}" for why in report.skipped_because)
        skipped = f"skipped           {report.skipped:,} documents that could not be read, such as{because}\n"
    if report.left_out:
        kinds = ", ".join(f"{kind} {number:,}" for kind, number in report.left_out.items())
        skipped += f"left out          {count(sum(report.left_out.values()), 'file')} in folders: {kinds}\n"
    held_out_part = f"{report.held_out_tokens:,} tokens, by {report.held_out_by}" if held_out else "nothing"
    measured = "held-out part" if report.held_out_tokens else "training part"
    entropies = f"{report.unigram_cross_entropy:.3f} nats/token; its own entropy {report.unigram_entropy:.3f}"
    print(
        f"source            {report.source}\n"
        f"documents         {report.documents:,} ({report.text_bytes:,} bytes)\n"
        f"{skipped}"
        f"tokens            {report.tokens:,} ({report.bytes_per_token} bytes per token)\n"
        f"vocabulary        {report.vocab_size:,} (tokenizer {report.tokenizer})\n"
        f"held out          {held_out_part}\n"
        f"unigram loss      {entropies} ({measured})\n"
        f"wrote {report.out} in {report.secs:.1f} s"
    )
