"""Print the page of `titan inspect`: the model, the weights as a tree, then the other sections and values."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from converters.common.fold import TensorLine, tree_rows
from converters.common.sizes import format_bytes
from converters.containers.registry import CONTAINERS
from converters.families.args import DecoderArgs
from converters.families.llama2 import SENTENCEPIECE_VOCABULARIES
from converters.families.registry import get_family
from converters.inspect import Inspection
from titan_tools.terminal.console import count, table, wrapped

_COLUMNS = ("dtype", "shape", "tensors", "chunks", "bytes")
_MOST_VALUE = 100  # characters of a value


def print_page(report: Inspection, values: Mapping[str, Any], *, every: bool) -> None:
    """Print an inspection. `every`: tensors under their full names, one line each."""
    manifest = "with a manifest of titan's" if report.has_manifest else "no manifest"
    print(f"{report.path}: {CONTAINERS[report.container].title}, {report.naming} names, {manifest}")
    for line in _describe_model(report):
        print(wrapped(line, sys.stdout, indent=0 if line.startswith(" ") else 7))
    for text in report.notes:
        print(f"note:  {text}")
    if report.quantization:
        print(f"{report.quantization['method'] + ':':<6} {_quantization(report.quantization)}")
        for text in report.quantization["problems"]:
            print(f"{report.quantization['method'] + ':':<6} warning: {' '.join(text.split())}")
    if report.step is not None:
        print(f"step:  {report.step:,}")
    sizes = ", ".join(f"{format_bytes(size)} {dtype}" for dtype, size in report.dtypes.items())
    print(f"size:  {report.num_parameters:,} parameters ({sizes})")
    whole = (
        f"{format_bytes(report.num_bytes)} in {count(report.num_files, 'file')}, {count(report.num_chunks, 'chunk')}"
    )
    print(f"       {whole}\n")
    for section in sorted({line.section: None for line in report.lines}, key=lambda name: name != "model"):
        lines = [line for line in report.lines if line.section == section]
        title = "weights" if section == "model" else section
        table((title, *_COLUMNS), _rows(lines, every=every))
        print()
    if values:
        table(("value", ""), [(name, _shown(value)) for name, value in values.items()])


def _describe_model(report: Inspection) -> list[str]:
    lines = []
    m = dict(report.model or {})
    if m and not issubclass(get_family(m["family"]).args_type, DecoderArgs):
        own_numbers = (f"{name} {value}" for name, value in m.items() if name != "family")
        lines.append(f"model: {', '.join((m['family'], *own_numbers, *report.parts))}")
    elif m:
        heads = f"{m['num_heads']} heads ({m['num_kv_heads']} for keys and values) of {m['head_dim']}"
        tied = "output tied to the embedding" if m["tied"] else "output of its own"
        lines.append(
            f"model: {_family(m)}, {m['num_layers']} layers, dim {m['dim']}, {heads}, feed-forward {m['ffn_hidden']}, "
            f"vocabulary {m['vocab_size']:,}, {tied}" + "".join(f", {part}" for part in report.parts)
        )
        scaling, scaled = m["rope_scaling"], ""
        if scaling and "rope_type" in scaling:
            numbers = [f"{key} {value}" for key, value in scaling.items() if key != "rope_type" and value is not None]
            scaled = f", {scaling['rope_type']} ({', '.join(numbers)})"
        elif scaling:
            original = scaling["original_max_position_embeddings"]
            ramp = f"{scaling['low_freq_factor']:g} to {scaling['high_freq_factor']:g}"
            scaled = f", scaled by {scaling['factor']:g} (llama3, {ramp}, over {original:,})"
        lines.append(
            f"       RoPE theta {m['rope_theta']:,.10g}{scaled}; norm epsilon {m['norm_eps']:g}; "
            f"at most {m['max_seq_len']:,} tokens"
        )
    elif not report.model_problem:
        lines.append(
            "model: unknown; no titan_model.json, config.json or params.json describes it (--model-from gives one)"
        )
    if report.model_problem:
        lines.append(f"model: warning: {report.model_problem}")
    return lines


def _quantization(scheme: Mapping[str, Any]) -> str:
    """The quantization of the weights, and the bytes that they take."""
    rows, columns = scheme["weight_block_size"]
    kind = "power-of-two " if scheme["power_of_two_scales"] else ""
    dtypes = ", ".join(scheme["scale_dtypes"])
    return (
        f"{count(scheme['num_weights'], 'weight')} in {scheme['codes']} ({format_bytes(scheme['weight_bytes'])}), "
        f"{kind}scales in {dtypes} for blocks of {rows} × {columns} ({format_bytes(scheme['scale_bytes'])}); "
        f"read as {scheme['read_as']}"
    )


def _family(model: Mapping[str, Any]) -> str:
    """The family; a Llama with another vocabulary than Llama 2's only has its form of Meta's files."""
    is_release = model["family"] != "llama2" or model["vocab_size"] in SENTENCEPIECE_VOCABULARIES
    return model["family"] if is_release else "llama (in Llama 2's form)"


def _rows(lines: Sequence[TensorLine], *, every: bool) -> list[tuple[Any, ...]]:
    if every:
        return [_cells(line.name, line, line.num_tensors, line.num_chunks, line.num_bytes) for line in lines]
    moments = [row for row in map(_moment, lines) if row]
    if len(moments) == len(lines):
        return _fold_moments(lines)
    return [
        _cells("  " * row.depth + row.name, row.line, row.num_tensors, row.num_chunks, row.num_bytes)
        for row in tree_rows(lines)
    ]


def _cells(name: str, line: TensorLine | None, tensors: int, chunks: int, size: int) -> tuple[Any, ...]:
    return (name, line.dtype if line else "", list(line.shape) if line else "", tensors, chunks, format_bytes(size))


def _moment(line: TensorLine) -> str:
    """`exp_avg` of `optimizer.state.<parameter>.exp_avg`, "" for other names."""
    head, _, rest = line.name.partition(".state.")
    return rest.rpartition(".")[2] if rest and "." in rest and "." not in head.replace("optimizer", "") else ""


def _fold_moments(lines: Sequence[TensorLine]) -> list[tuple[Any, ...]]:
    """One row for each kind of optimizer state, which has its parameter's layout; --every lists all."""
    groups: dict[tuple[str, str, bool], list[TensorLine]] = {}
    for line in lines:
        groups.setdefault((_moment(line), line.dtype, bool(line.shape)), []).append(line)
    return [
        (
            f"{kind} of {count(sum(line.num_tensors for line in group), 'parameter')}",
            dtype,
            "as the parameter" if shaped else [],
            sum(line.num_tensors for line in group),
            sum(line.num_chunks for line in group),
            format_bytes(sum(line.num_bytes for line in group)),
        )
        for (kind, dtype, shaped), group in groups.items()
    ]


def _shown(value: Any) -> str:
    """A value on one line, without control characters."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _MOST_VALUE else text[:_MOST_VALUE] + f"… ({len(text):,} characters)"
