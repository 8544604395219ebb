"""From an open checkpoint to a rank's model: configuration, tokenizer, damage check, weights."""

from dataclasses import replace

import torch

from converters.common.errors import CheckpointError, ConfigError
from converters.conversion.trained_by import foreign_remark
from converters.integrity.source_check import check_read_files
from converters.quantized.stored_blocks import BlocksSource
from converters.source.weights import NativeWeights
from titan_tools.infer.decoding.sampling import check_logprobs, check_sampling
from titan_tools.infer.find import FoundCheckpoint, find_tokenizer
from titan_tools.infer.generation_config import follow, read_generation_config
from titan_tools.infer.identity import origin_of
from titan_tools.infer.memory import memory_for_weights
from titan_tools.infer.model.compiling import check_compiler
from titan_tools.infer.model.load import SlicedModel, load_model, numbers_of
from titan_tools.infer.model.quantize import STORED, why_slow
from titan_tools.infer.model.tensor_parallel import check_tp
from titan_tools.infer.ranks import TPRanks, check_devices, tp_degree
from titan_tools.infer.request import Request, check_options
from titan_tools.infer.task import Work
from titan_tools.infer.text.chat_template import read_template
from titan_tools.infer.text.vocabulary import read_vocabulary
from titan_tools.terminal.console import note

_COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


def prepare_work(request: Request, weights: NativeWeights) -> Work:
    """Check the request against the checkpoint's headers and tokenizer, before ranks start and weights are read."""
    args = numbers_of(weights.info)
    tp = tp_degree(request.tp)
    check_tp(args, tp)
    check_devices(tp)
    if request.compile:
        check_compiler(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    folder = find_tokenizer(weights.catalog.root, request.model_from, weights.info.assets)
    if request.generation_config:
        config = read_generation_config(folder, weights.info)
        request = follow(config, request, folder=folder, vocab_size=args.vocab_size)
        check_options(request)
    kept = BlocksSource(weights.source).format if request.quantize == STORED else None
    if request.quantize == STORED and kept is None:
        raise ConfigError(
            "--quantize stored keeps the float8 or mxfp4 weights of a checkpoint, and this one has none",
            tries=["--quantize int8"],
        )
    check_sampling(request.sampling, vocab_size=args.vocab_size)
    check_logprobs(request.logprobs, vocab_size=args.vocab_size)
    vocabulary = read_vocabulary(folder, weights.info)
    template = replace(read_template(folder), moment=request.moment) if request.chat else None
    stored = weights.source.tensors["tok_embeddings.weight"].dtype
    # 8-bit kernels take bfloat16 only, and what quantization loses exceeds what fp32 sums would gain
    default = "bfloat16" if request.quantize else stored if stored in _COMPUTE_DTYPES else "float32"
    origin = origin_of(weights, tokenizer=folder) if request.out or tp > 1 else None
    return Work(request, args, vocabulary, template, tp, request.dtype or default, folder, origin, kept)


def is_damaged(found: FoundCheckpoint, weights: NativeWeights, ranks: TPRanks) -> bool:
    """Whether a step of a run is damaged, so that an older one is used instead; a note says so, as in training.

    Each rank reads a share of the files. Raises CheckpointError if the user named the damaged checkpoint itself.
    """
    if ranks.is_first:
        for skipped in found.skipped:
            note(f"skipped {skipped}")
        if found.is_step:
            note(f"reading {found.place}")
        for text in filter(None, (*weights.notes, foreign_remark(weights.catalog, weights.naming, weights.info))):
            note(f"{found.place}: {text}")
        for text in weights.info.notes:
            note(text)
    names = [name for names in weights.source.ledger.used.values() for name in names]
    try:
        ranks.done_by_each(check_read_files, weights.catalog, names, do_all=ranks.divided)
    except CheckpointError as damage:
        if not found.is_step:
            raise
        if ranks.is_first:
            note(f"WARNING: skipping a damaged step: {damage.message}")
        return True
    return False


def load_weights(work: Work, weights: NativeWeights, ranks: TPRanks, *, rows: int) -> SlicedModel:
    """Read this rank's slices into its part of the model. Raises OutOfMemory."""
    quantize, dtype = work.request.quantize, getattr(torch, work.dtype)
    reason = quantize and why_slow(quantize, dtype=dtype, device=ranks.device, rows=rows, stored=work.stored)
    if reason and ranks.is_first:
        note(reason)
    with memory_for_weights(work, weights, ranks.rank):
        return load_model(
            BlocksSource(weights.source) if quantize == STORED else weights.source,
            weights.info,
            dtype=dtype,
            device=ranks.device,
            tp=ranks.tp,
            rank=ranks.rank,
            quantize=quantize,
            packed=not work.request.compile,
        )
