"""Views under other names: permuted as transformers' formula says, each the inverse of the other, and complete."""

from dataclasses import replace

import numpy as np
import pytest

from converters.common.box import Box
from converters.common.errors import CheckpointError
from converters.families.args import DecoderArgs
from converters.families.llama import HF, META, TITAN_MODEL_PREFIX, TITAN_QKV_LINEAR
from converters.families.llama3 import LLAMA3
from converters.model.model_info import ModelInfo
from converters.naming.foreign_view import foreign_view
from converters.naming.namings import detect_naming, native_naming
from converters.naming.native_view import native_view
from converters.views.expressions import Source
from tests.unit.converters.samples import Arrays

# head_dim ≠ dim / num_heads, grouped queries, more than 10 layers: `layers.1` must not take `layers.11`
ARGS = DecoderArgs(dim=24, num_layers=12, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden=20, vocab_size=31)
INFO = ModelInfo("llama3", ARGS)
TIED = ModelInfo("llama3", replace(ARGS, tied=True))


def native_arrays(info=INFO):
    rng = np.random.default_rng(0)
    return {p.fqn: rng.standard_normal(p.shape, dtype=np.float32) for p in LLAMA3.parameters(info.args)}


def whole(view, name):
    return view.read(name, Box.whole(view.tensors[name].shape))


def hf_arrays(info=INFO):
    view = foreign_view(Arrays(native_arrays(info)), info, HF)
    return {name: whole(view, name) for name in view.tensors}


def permuted_as_transformers_does(weight, num_heads):
    """convert_llama_weights_to_hf.py's permute, interleaved → halves."""
    rows, dim = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, dim).swapaxes(1, 2).reshape(rows, dim)


def test_q_and_k_are_permuted_by_their_own_head_count():
    native, hf = native_arrays(), hf_arrays()
    for n in range(12):
        ours, theirs = f"layers.{n}.attention.", f"model.layers.{n}.self_attn."
        assert np.array_equal(
            hf[theirs + "q_proj.weight"], permuted_as_transformers_does(native[ours + "wq.weight"], 4)
        )
        assert np.array_equal(
            hf[theirs + "k_proj.weight"], permuted_as_transformers_does(native[ours + "wk.weight"], 2)
        )
        assert np.array_equal(hf[theirs + "v_proj.weight"], native[ours + "wv.weight"])


@pytest.mark.parametrize("naming", [HF, META, TITAN_MODEL_PREFIX, TITAN_QKV_LINEAR], ids=lambda n: n.name)
@pytest.mark.parametrize("info", [INFO, TIED], ids=["untied", "tied"])
def test_there_and_back(naming, info):
    arrays = native_arrays(info)
    foreign = foreign_view(Arrays(arrays), info, naming)
    back = native_view(foreign, info, naming)
    assert list(back.tensors) == list(arrays)
    for name, array in arrays.items():
        assert np.array_equal(whole(back, name), array)
    assert detect_naming(foreign.tensors, LLAMA3).name == (naming.name if naming is not META else "native")


def test_any_box_of_a_permuted_tensor():
    foreign = foreign_view(Arrays(native_arrays()), INFO, HF)
    view = native_view(foreign, INFO, HF)
    for name in ("layers.0.attention.wq.weight", "layers.11.attention.wk.weight"):
        rows, cols = view.tensors[name].shape
        full = whole(view, name)
        for start in range(rows):
            for size in (0, 1, 3, rows - start):
                box = Box((start, 5), (min(size, rows - start), cols - 5))
                assert np.array_equal(view.read(name, box), full[box.slices_within(Box.whole(full.shape))])


def test_boxes_of_whole_heads_read_nothing_else():
    spans = []

    class Watched(Arrays):
        def read(self, fqn, box):
            spans.append(box)
            return super().read(fqn, box)

    view = native_view(Watched(hf_arrays()), INFO, HF)
    view.read("layers.0.attention.wq.weight", Box((8, 0), (16, 24)))
    assert spans == [Box((8, 0), (16, 24))]


def test_everything_wrong_is_reported_at_once():
    arrays = hf_arrays()
    del arrays["model.layers.3.mlp.up_proj.weight"]
    arrays["model.layers.12.mlp.up_proj.weight"] = np.zeros((20, 24), np.float32)
    arrays["model.layers.01.mlp.up_proj.weight"] = np.zeros((20, 24), np.float32)
    arrays["model.norm.weight"] = np.zeros((25,), np.float32)
    arrays["model.layers.0.mlp.down_proj.weight"] = arrays["model.layers.0.mlp.down_proj.weight"].T.copy()
    arrays["lm_head.weight"] = arrays["lm_head.weight"].astype(np.int32)
    with pytest.raises(CheckpointError) as error:
        native_view(Arrays(arrays), INFO, HF)
    lines = error.value.message.splitlines()
    assert "6 problems" in lines[0]
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "dtype lm_head.weight is int32, should be a floating type",
        "missing model.layers.3.mlp.up_proj.weight [20, 24]",
        "shape model.layers.0.mlp.down_proj.weight is [20, 24], should be [24, 20]",
        "shape model.norm.weight is [25], should be [24]",
        "unexpected model.layers.01.mlp.up_proj.weight",
        "unexpected model.layers.12.mlp.up_proj.weight",
    ]


def test_missing_output_points_at_tying():
    with pytest.raises(CheckpointError, match=r"no output weight .lm_head.weight") as error:
        native_view(Arrays(hf_arrays(TIED)), INFO, HF)
    assert "tie_word_embeddings: true" in error.value.hint


def test_second_copy_of_a_tied_embedding():
    arrays = hf_arrays(TIED)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    view = native_view(Arrays(arrays), TIED, HF)
    assert "output.weight" not in view.tensors
    assert view.ledger.dropped == {"lm_head.weight": "tied: equal to the embedding, bit for bit"}
    arrays["lm_head.weight"][-1, -1] += 1
    with pytest.raises(
        CheckpointError, match="tied, but lm_head.weight differs from model.embed_tokens.weight.* differ"
    ):
        native_view(Arrays(arrays), TIED, HF)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].astype(np.float16)
    with pytest.raises(CheckpointError, match="float32.*float16"):
        native_view(Arrays(arrays), TIED, HF)


def test_a_tied_weight_may_have_either_of_its_names():
    arrays = hf_arrays(TIED)
    embedding = arrays.pop("model.embed_tokens.weight")
    arrays["lm_head.weight"] = embedding
    view = native_view(Arrays(arrays), TIED, HF)
    assert view.ledger.used["tok_embeddings.weight"] == ("lm_head.weight",) and not view.ledger.dropped
    assert np.array_equal(whole(view, "tok_embeddings.weight"), embedding)
    with pytest.raises(
        CheckpointError, match=r"missing +model.embed_tokens.weight"
    ):  # untied: two weights, one is gone
        native_view(Arrays(arrays), INFO, HF)


def test_names_within_a_dict_of_the_file():
    nested = {f"state.{name}": array for name, array in hf_arrays().items()}
    with pytest.raises(CheckpointError, match="no tensor has a name"):
        detect_naming(nested, LLAMA3)
    naming = detect_naming(nested, LLAMA3, nest="state.")
    view = native_view(Arrays(nested), INFO, naming)
    assert naming.name == "hf" and view.ledger.used["norm.weight"] == ("state.model.norm.weight",)
    assert np.array_equal(whole(view, "layers.3.attention.wk.weight"), native_arrays()["layers.3.attention.wk.weight"])
    with pytest.raises(CheckpointError, match=r"unexpected +state.other"):
        native_view(Arrays(nested | {"state.other": np.zeros(2)}), INFO, naming)


def test_drops_carry_their_reason():
    arrays = hf_arrays()
    arrays["model.layers.11.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    view = native_view(Arrays(arrays), INFO, HF)
    assert list(view.ledger.dropped) == ["model.layers.11.self_attn.rotary_emb.inv_freq"]
    assert "rope_theta" in next(iter(view.ledger.dropped.values()))
    used = {*(name for names in view.ledger.used.values() for name in names), *view.ledger.dropped}
    assert used == set(arrays)


def test_names_of_no_model():
    with pytest.raises(CheckpointError, match="no tensor has a name of a llama3 model"):
        detect_naming(["encoder.block.0.weight"], LLAMA3)
    with pytest.raises(CheckpointError, match="no tensor has a name"):
        detect_naming([], LLAMA3)


def test_native_names_are_native():
    assert detect_naming(native_arrays(), LLAMA3).name == "native"
    assert detect_naming([*native_arrays(), "rope.freqs"], LLAMA3).name == "meta"
    view = native_view(Arrays(native_arrays()), INFO, native_naming(LLAMA3))
    assert all(isinstance(made, Source) for made in view.expressions.values())


def test_very_many_offenders_are_all_named_on_one_page():
    hf = {n: a for n, a in hf_arrays().items() if ".mlp." not in n and "layers.3.self_attn.q" not in n}
    with pytest.raises(CheckpointError, match="37 problems") as error:
        native_view(Arrays(hf), INFO, HF)
    assert error.value.message.splitlines()[1:] == [
        "  missing     model.layers.{0..11}.mlp.down_proj.weight  [24, 20]",
        "  missing     model.layers.{0..11}.mlp.gate_proj.weight  [20, 24]",
        "  missing     model.layers.{0..11}.mlp.up_proj.weight  [20, 24]",
        "  missing     model.layers.3.self_attn.q_proj.weight  [32, 24]",
    ]
