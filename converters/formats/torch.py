"""A torch.save file of the weights under native names: model.pt in a folder that describes it, or a single file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.formats.base import CommandHelp, Contents, Format, OutputOptions

if TYPE_CHECKING:
    from converters.containers.target import Target

_SUFFIXES = (".pt", ".pth", ".bin")


def _plan(contents: Contents, options: OutputOptions) -> Target:
    from converters.common.names import TORCH_MODEL
    from converters.containers.torch_write import plan_torch

    file = contents.dst.name if contents.dst.suffix in _SUFFIXES else TORCH_MODEL
    return plan_torch(contents.tensors, file=file, streamed=contents.streamed)


TORCH = Format(
    name="torch",
    called="a torch file",
    containers=("torch",),
    takes=(),
    naming=lambda family, options: None,
    plan=_plan,
    file_suffixes=_SUFFIXES,
    destination_help="The .pt, .pth or .bin file to make; else a folder with model.pt.",
    to_dcp=CommandHelp(
        "A torch.save file to DCP.",
        "Convert a torch.save file (.pt, .pth, .bin) to DCP; of a training checkpoint, only the model.\n\n"
        "Native, Hugging Face, Meta and torchtune names are recognized.",
        (
            "torch-to-dcp checkpoint.pt llama-dcp --model-from Llama-3.1-8B",
            "torch-to-dcp pytorch_model_folder llama-dcp --for-mesh dp_shard=8",
        ),
    ),
    from_dcp=CommandHelp(
        "DCP to a torch.save file.",
        "Convert DCP to one torch.save file with the weights under their native names, for torch.load.\n\n"
        "A DST that ends in .pt, .pth or .bin is that file. Any other is a folder: model.pt, titan_model.json, "
        "tokenizer, manifest.",
        (
            "dcp-to-torch outputs/checkpoint/step-1000 my-model.pt",
            "dcp-to-torch outputs/checkpoint/step-1000 my-model --dtype bfloat16",
        ),
    ),
)
