"""Models of every family in every form that titan writes: native values, there and back, other names, refusals."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from converters.common.errors import UnsupportedError
from converters.diff import diff
from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import read_model_info
from converters.source.weights import open_native
from converters.verify import verify
from tests.checkpoint_forms import write_byte_ranks
from tests.doors import convert
from tests.fp8_folders import read_folder
from tests.models import deepseek, dense, gpt_oss, llama4, qwen3_moe
from tests.models.names import interleaved, native_arrays
from tests.unit.converters.samples import assert_same, load_dcp

LINEAR = {"rope_type": "linear", "factor": 4.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
SPECIAL = {"vocab_size": 302}  # 256 bytes and what Llama 3's special tokens need, which torchtune's reader wants
EVEN = {"vocab_size": 98}  # two tensor-parallel ranks divide it


def _dense(name: str, **numbers):
    return partial(dense.write, name=name, numbers=EVEN | numbers)


MODELS = {
    "llama2": _dense("llama2"),  # eleven layers: `layers.1` must not take `layers.10`
    "llama3": _dense("llama3", **SPECIAL),
    "llama3 tied": _dense("llama3_tied", **SPECIAL, rope_scaling=dense.SCALING),
    "llama3 biases, linear RoPE": _dense("llama3", **BIASES, rope_scaling=LINEAR),
    "llama2 biases of attention": _dense("llama2", attention_bias=True, num_hidden_layers=2),
    "llama3 tied, biases of MLPs": _dense("llama3_tied", mlp_bias=True),
    "llama2 linear RoPE": _dense("llama2", rope_scaling=LINEAR, num_hidden_layers=2),
    "qwen3": _dense("qwen3"),
    "qwen3 tied": _dense("qwen3_tied"),
    "qwen3 biases": _dense("qwen3", attention_bias=True, num_hidden_layers=2),
    "qwen3 I != H": partial(qwen3_moe.write, vocab_size=98),
    "qwen3 I = H": partial(qwen3_moe.write, vocab_size=98, moe_intermediate_size=32),
    **{
        f"deepseek_v3 {name}": partial(deepseek.write, name=name, vocab_size=98, dtype="bfloat16")
        for name in deepseek.NUMBERS
    },
    **{f"llama4 {name}": partial(llama4.write, name=name) for name in llama4.NUMBERS},
    "gpt_oss": partial(gpt_oss.write, vocab_size=98),
}
WITH_EXPERTS = {model for model in MODELS if model.startswith(("deepseek", "llama4", "gpt_oss", "qwen3 I"))}
FUSED = {model for model in WITH_EXPERTS if model.startswith(("deepseek", "qwen3"))}
METAS = {"llama2", "llama3", "llama3 tied", *(model for model in MODELS if model.startswith("llama4"))}
TORCHTUNES = {"llama3", "llama3 tied"}
FORMS = {  # form → target, name of the output, options, models that have it
    "dcp": ("dcp", "out", OutputOptions(), MODELS),
    "dcp for a mesh": ("dcp", "out", OutputOptions(mesh=MeshShape(pp=2, dp_shard=5)), MODELS),  # 12 experts on 5 ranks
    "dcp for TP": ("dcp", "out", OutputOptions(mesh=MeshShape(dp_shard=3, tp=2)), MODELS.keys() - WITH_EXPERTS),
    "dcp for experts": ("dcp", "out", OutputOptions(mesh=MeshShape(dp_shard=4, tp=2, ep=4)), WITH_EXPERTS),
    "torch": ("torch", "out", OutputOptions(), MODELS),
    "torch file": ("torch", "out.pt", OutputOptions(), MODELS),
    "hf": ("hf", "out", OutputOptions(shard_bytes=60_000), MODELS),
    "hf fused": ("hf", "out", OutputOptions(fused_experts=True), FUSED),
    "meta": ("meta", "out", OutputOptions(), METAS),
    "meta, 2 shards": ("meta", "out", OutputOptions(num_shards=2), METAS),
    "torchtune": ("torchtune", "out", OutputOptions(), TORCHTUNES),
    "torchtune's meta": ("torchtune", "out", OutputOptions(style="meta"), TORCHTUNES),
    "torchtune's own": ("torchtune", "out", OutputOptions(style="torchtune"), TORCHTUNES),
}
QKV = {f"attention.w{x}": f"attention.qkv_linear.w{x}" for x in "qkv"}
EXPERTS = {
    "moe.experts.w1": "moe.routed_experts.inner_experts.w1_EFD",
    "moe.experts.w2": "moe.routed_experts.inner_experts.w2_EDF",
    "moe.experts.w3": "moe.routed_experts.inner_experts.w3_EFD",
    "moe.expert_bias": "moe.expert_bias_E",
}
NEWEST = {  # torchtitan's newest names of each family's weights; the output's is lm_head
    "qwen3": QKV | EXPERTS,
    "deepseek_v3": EXPERTS,
    "llama4": QKV,
    "gpt_oss": QKV
    | {"moe.expert_bias": "moe.expert_bias_E"}
    | {
        f"moe.experts.{ours}": f"moe.routed_experts.inner_experts.{ours}_{letters}"
        for ours, letters in {"mlp1_weight": "EGD", "mlp1_bias": "EG", "mlp2_weight": "EDF", "mlp2_bias": "ED"}.items()
    },
}


def family_of(model: str) -> str:
    return model.partition(" ")[0]


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    """(its name, model, root): root/hf, a folder that transformers wrote, and root/dcp."""
    root = tmp_path_factory.mktemp("source")
    model = MODELS[request.param](root / "hf")
    if request.param in TORCHTUNES:
        write_byte_ranks(root / "hf" / "tokenizer.model")
    convert(root / "hf", root / "dcp", to="dcp")
    return request.param, model, root


def expected_of(name, model):
    """Native arrays of a model of transformers: rows of Llama's q and k are pairs; a tied output is not there."""
    arrays = native_arrays(model)
    if model.config.tie_word_embeddings:
        del arrays["output.weight"]
    if family_of(name) in ("llama2", "llama3"):
        heads = {"wq": model.config.num_attention_heads, "wk": model.config.num_key_value_heads}
        for fqn in arrays:
            if (module := fqn.split(".")[-2]) in heads:
                arrays[fqn] = interleaved(arrays[fqn], heads[module])
    return arrays


def test_native_values_are_those_that_transformers_holds(source):
    """Read from Hugging Face's folder, and by stock dcp.load from a DCP."""
    name, model, root = source
    expected = expected_of(name, model)
    with open_native(root / "hf") as weights:
        assert weights.tensors.keys() == expected.keys()
        for fqn, array in expected.items():
            assert np.array_equal(weights.read(fqn).astype(np.float32), array), fqn
        dtypes = {fqn: getattr(torch, info.dtype) for fqn, info in weights.tensors.items()}
    assert {dtypes[fqn] for fqn in expected if fqn.endswith("expert_bias")} <= {torch.float32}
    like = {fqn: torch.empty(array.shape, dtype=dtypes[fqn]) for fqn, array in expected.items()}
    for fqn, tensor in load_dcp(root / "dcp", like).items():
        assert np.array_equal(tensor.float().numpy(), expected[fqn]), fqn


def pairs() -> list:
    """Every model in every form that it has. Most are slow tests: all go through all forms in turn, too."""
    quick = ("qwen3 I != H", "llama4 maverick")
    every = [(model, form) for model in MODELS for form in FORMS if model in FORMS[form][3]]
    return [pytest.param(*pair, marks=[pytest.mark.slow] * (pair[0] not in quick)) for pair in every]


@pytest.mark.parametrize(("source", "form"), pairs(), indirect=["source"])
def test_there_and_back(source, form, tmp_path):
    _, _, root = source
    to, out, options, _ = FORMS[form]
    convert(root / "hf", tmp_path / out, to=to, options=options)
    assert verify(tmp_path / out).ok
    model_from = root / "hf" if out == "out.pt" else None
    assert diff(tmp_path / out, root / "dcp").equal
    convert(tmp_path / out, tmp_path / "hf", to="hf", model_from=model_from)
    assert_same(read_folder(tmp_path / "hf"), read_folder(root / "hf"))


LIKE_OTHERS = {"llama3", "llama2 biases of attention", "llama3 tied, biases of MLPs", "qwen3", "qwen3 I != H"}
LIKE_OTHERS |= {"llama2", "deepseek_v3 v2", "deepseek_v3 v3", "deepseek_v3 moonlight", "deepseek_v3 kimi"}
LIKE_OTHERS |= {"llama4 square", "llama4 maverick"}


IN_STORE = {"llama3 tied", "qwen3 I != H"}  # the others, in an object store, are slow tests


@pytest.mark.parametrize(
    ("source", "store"),
    [
        *(pytest.param(model, "folder", marks=[pytest.mark.slow] * (model in LIKE_OTHERS)) for model in MODELS),
        *(pytest.param(model, "pretend", marks=[pytest.mark.slow] * (model not in IN_STORE)) for model in MODELS),
    ],
    indirect=True,
)
def test_through_every_form_in_turn(source, place, tmp_path):
    """Each is written from the one before, not from Hugging Face's: what is written depends on the model alone."""
    name, model, root = source
    last = root / "hf"
    for number, (form, (to, _, options, models)) in enumerate(FORMS.items()):
        only_paths = to == "torchtune" and place is not tmp_path  # its recipe names the folder
        if name in models and form != "torch file" and not only_paths:
            convert(last, place / str(number), to=to, options=options)
            last = place / str(number)
    convert(last, tmp_path / "hf", to="hf")
    assert_same(read_folder(tmp_path / "hf"), read_folder(root / "hf"))
    first, again = (read_model_info(folder / "hf") for folder in (root, tmp_path))
    assert (again.args, again.untranslated) == (first.args, first.untranslated)
    tokens = torch.arange(40)[None] * 7 % 97
    attention = {"attn_implementation": "eager"} if name in WITH_EXPERTS else {}
    theirs, again = (AutoModelForCausalLM.from_pretrained(f / "hf", **attention).eval() for f in (root, tmp_path))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    for source_of, out in ((root / "hf", "a"), (last, "b")):
        convert(source_of, tmp_path / out, to="torch")
    assert (tmp_path / "a" / "model.pt").read_bytes() == (tmp_path / "b" / "model.pt").read_bytes()


@pytest.mark.parametrize("source", [model for model in MODELS if model in WITH_EXPERTS], indirect=True)
def test_torchtitans_newest_names_are_read(source, tmp_path):
    name, _, root = source
    convert(root / "dcp", tmp_path / "native", to="torch")
    newest = {}
    for fqn, weight in torch.load(tmp_path / "native" / "model.pt").items():
        for ours, theirs in NEWEST[family_of(name)].items():
            fqn = fqn.replace(ours, theirs) if f".{ours}." in f"{fqn}." else fqn
        newest["lm_head.weight" if fqn == "output.weight" else fqn] = weight
    assert name.startswith("llama4") or not any(fqn.endswith(("experts.w1", "experts.mlp1_weight")) for fqn in newest)
    torch.save(newest, tmp_path / "theirs.pt")
    report = convert(tmp_path / "theirs.pt", tmp_path / "out", to="dcp", model_from=root / "dcp")
    assert report.made == {} and report.source_format == "torch, titan_qkv_linear names"
    assert diff(tmp_path / "out", root / "dcp").equal


def refusal(model: str, to: str) -> str:
    """Why a format cannot hold a model."""
    if "biases" in model and not model.startswith("qwen3"):
        return {"meta": "the naming 'meta' has no names", "torchtune": "biases of linear layers"}[to]
    if "linear RoPE" in model:
        return {"meta": "Llama 2 cannot express RoPE of type linear", "torchtune": "RoPE of type linear"}[to]
    return {"meta": "Meta's format", "torchtune": "torchtune 0.6.1"}[to] + f" has no {family_of(model)} models"


REFUSED = [
    (model, to)
    for to, taken in (("meta", METAS), ("torchtune", TORCHTUNES | {"llama2"}))
    for model in MODELS
    if model not in taken
]
REFUSED = list({(family_of(model), to): (model, to) for model, to in REFUSED}.values())  # one of each family


@pytest.mark.parametrize(("source", "to"), REFUSED, indirect=["source"])
def test_formats_without_such_models_say_so(source, to, tmp_path):
    name, _, root = source
    with pytest.raises(UnsupportedError, match=refusal(name, to)):
        convert(root / "dcp", tmp_path / "out", to=to)
    assert list(tmp_path.iterdir()) == []
