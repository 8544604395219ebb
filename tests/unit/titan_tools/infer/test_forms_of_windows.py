"""Greedy tokens of GPT-OSS and Llama 4 past window, chunk and temperature's length, from every form they come in."""

import pytest

from converters.formats.base import OutputOptions
from tests.doors import convert
from tests.greedy_reference import assert_same, greedy
from tests.models.gpt_oss import write as write_gpt_oss
from tests.models.gpt_oss import write_mxfp4
from tests.models.llama4 import write as write_llama4
from tests.models.llama4 import write_meta
from tests.tiny_infer import complete, load

PROMPTS = [[(37 * n + 11 * k) % 97 for n in range(length)] for k, length in enumerate((1, 5, 8, 13, 31))]
NEW = 20
pytestmark = pytest.mark.usefixtures("one_thread")


def assert_says(model, said, folder, tell, **options):
    ours = [c.tokens for c in complete(load(folder, **options), PROMPTS, rows=3, max_new_tokens=NEW)]
    assert_same(model, PROMPTS, ours, said, tell=tell, what=folder.name)


@pytest.fixture(scope="module")
def oss(tmp_path_factory):
    """A folder in mxfp4, transformers' model of its values, and what that says."""
    folder = tmp_path_factory.mktemp("oss")
    model = write_gpt_oss(folder / "source", dtype="float32")
    values = write_mxfp4(folder / "mxfp4", folder / "source")
    model.load_state_dict({name: tensor.float() for name, tensor in values.items()})
    return folder, model, greedy(model, PROMPTS, NEW)


@pytest.mark.parametrize("form", ["mxfp4", "dcp", "openai", "hf"])
def test_gpt_oss(oss, form, tell):
    folder, model, said = oss
    if form != "mxfp4":
        options = OutputOptions(quantize="mxfp4") if form == "openai" else OutputOptions()
        convert(folder / "mxfp4", folder / form, to=form, options=options)
    assert_says(model, said, folder / form, tell)


@pytest.fixture(scope="module", params=["scout", "maverick"])
def llama4(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama4")
    model = write_llama4(folder / "multimodal", request.param, multimodal=True)
    # one by one: transformers counts padding as tokens of chunks, and in the temperature
    return folder, model.language_model, greedy(model.language_model, PROMPTS, NEW, batch=1)


@pytest.mark.parametrize("form", ["multimodal", "meta", "meta of two shards", "dcp"])
def test_llama_4(llama4, form, tell):
    folder, model, said = llama4
    if form.startswith("meta"):
        write_meta(folder / form, model, count=2 if "two" in form else 1)
    if form == "dcp":
        convert(folder / "multimodal", folder / form, to="dcp")
    assert_says(model, said, folder / form, tell)
