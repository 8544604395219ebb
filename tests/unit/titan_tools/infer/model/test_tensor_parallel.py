"""The slices of the ranks together are the model: every element once, KV heads as often as query heads need them."""

from dataclasses import replace

import numpy as np
import pytest

from converters.common.box import Box
from converters.common.errors import ConfigError
from converters.families.llama3 import FLAVORS, parameters
from titan_tools.infer.model.tensor_parallel import check_tp, same_input, slice_for_rank, summed_inputs, valid_tp

ODD = replace(FLAVORS["debug_gqa"], vocab_size=301, ffn_hidden=90)  # 8 heads, 4 KV heads


@pytest.mark.parametrize("args", [ODD, FLAVORS["debugmodel"], FLAVORS["debug_tied"]])
def test_every_element_is_held(args):
    for tp in valid_tp(args):
        copies = max(1, tp // args.num_kv_heads)
        for parameter in parameters(args):
            held = np.zeros(parameter.shape, dtype=np.int8)
            whole = Box.whole(parameter.shape)
            for rank in range(tp):
                held[slice_for_rank(parameter, args, tp=tp, rank=rank).slices_within(whole)] += 1
            per_kv_head = ".wk." in parameter.fqn or ".wv." in parameter.fqn
            expected = tp if parameter.tp_dim is None else copies if per_kv_head else 1
            assert (held == expected).all(), (parameter.fqn, tp)


def test_a_rank_holds_the_kv_heads_of_its_query_heads():
    named = {p.fqn: p for p in parameters(ODD)}
    group = ODD.num_heads // ODD.num_kv_heads
    for tp in valid_tp(ODD):
        for rank in range(tp):
            q, k = (
                slice_for_rank(named[f"layers.0.attention.{w}.weight"], ODD, tp=tp, rank=rank) for w in ("wq", "wk")
            )
            q_heads = range(q.offsets[0] // ODD.head_dim, (q.offsets[0] + q.sizes[0]) // ODD.head_dim)
            k_heads = range(k.offsets[0] // ODD.head_dim, (k.offsets[0] + k.sizes[0]) // ODD.head_dim)
            assert {head // group for head in q_heads} == set(k_heads)


def test_partial_sums_are_wo_and_w2():
    assert summed_inputs(parameters(ODD)) == [
        f"layers.{n}.{name}" for n in range(4) for name in ("attention.wo", "feed_forward.w2")
    ]


@pytest.mark.parametrize(
    "heads, kv_heads, valid",
    [(8, 4, [1, 2, 4, 8]), (12, 3, [1, 3, 6, 12]), (24, 8, [1, 2, 4, 8, 24]), (6, 6, [1, 2, 3, 6])],
)
def test_valid_degrees(heads, kv_heads, valid):
    args = replace(ODD, num_heads=heads, num_kv_heads=kv_heads)
    assert valid_tp(args) == valid
    for tp in valid:
        check_tp(args, tp)


def test_a_degree_that_cannot_work_names_those_that_can():
    with pytest.raises(ConfigError, match="--tp 3 cannot split 8 attention heads and 4 key/value heads") as caught:
        check_tp(ODD, 3)
    assert caught.value.hint == "valid: 1, 2, 4, 8"
    assert caught.value.tries == ("--tp 2",)


def test_layers_with_the_same_input_are_together():
    expected = []
    for n in range(ODD.num_layers):
        expected.append(tuple(f"layers.{n}.attention.{name}" for name in ("wq", "wk", "wv")))
        expected.append(tuple(f"layers.{n}.feed_forward.{name}" for name in ("w1", "w3")))
    assert same_input(parameters(ODD)) == expected


def test_a_layer_whose_siblings_are_not_there_is_in_no_group():
    without = [p for p in parameters(ODD) if not p.fqn.endswith(".w3.weight")]
    assert not any("w1" in path for group in same_input(without) for path in group)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_biases_are_cut_as_the_rows_of_their_weights(tp):
    for parameter in parameters(ODD):
        if parameter.tp_dim == 0 and len(parameter.shape) == 2:
            bias = parameter.bias()
            for rank in range(tp):
                whole, rows = (slice_for_rank(p, ODD, tp=tp, rank=rank) for p in (parameter, bias))
                assert (rows.offsets, rows.sizes) == (whole.offsets[:1], whole.sizes[:1]), bias.fqn
        elif parameter.tp_dim == 1:  # added once, to the sum of all ranks
            assert parameter.bias().tp_dim is None
