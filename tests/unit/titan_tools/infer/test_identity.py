"""Whether two runs have the same weights: found without reading them, wherever and in whatever format they lie."""

import json
import shutil

import pytest

from converters.common.box import Box
from converters.source.weights import open_native
from converters.views.view import View
from titan_tools.infer.identity import origin_of


def weights_in(folder):
    with open_native(folder) as weights:
        return origin_of(weights, tokenizer=folder).weights


@pytest.fixture
def converted(titan, tmp_path):
    """`converted("dcp-to-hf", source, name, …)`: what `titan convert` makes, with a manifest."""

    def convert(how, source, name, *options):
        code, _, err = titan("convert", how, source, tmp_path / name, *options)
        assert code == 0, err
        return tmp_path / name

    return convert


def test_digests_are_the_same_in_any_format(converted, hf, tmp_path):
    dcp = converted("hf-to-dcp", hf, "dcp")
    back = converted("dcp-to-hf", dcp, "back")
    output = weights_in(dcp)
    assert output.startswith("digests ") and output == weights_in(back) == weights_in(dcp.rename(tmp_path / "moved"))


def test_a_sample_is_the_same_in_any_format(converted, hf):
    """The rows of q and k stand in another order in it."""
    output = weights_in(hf)
    assert output.startswith("sampled ") and output == weights_in(converted("hf-to-dcp", hf, "plain", "--no-digest"))


def test_each_tensor_is_in_it(hf, monkeypatch):
    """Also one of which only the end differs; and what is read of each is little."""
    read, num_read, output = View.read, [], set()

    def changed(changes):
        def read_changed(self, fqn, box: Box):
            values = read(self, fqn, box).copy()
            num_read.append(values.size)
            if fqn == changes and box.offsets[0] + box.sizes[0] == self.tensors[fqn].shape[0]:
                values.reshape(-1)[-1] += 1
            return values

        return read_changed

    with open_native(hf) as weights:
        names = [*weights.source.tensors]
        for name in (None, *names):
            monkeypatch.setattr(View, "read", changed(name))
            output.add(origin_of(weights, tokenizer=hf).weights)
    assert len(output) == len(names) + 1 and max(num_read) <= 512


def test_a_manifest_next_to_weights_of_somebody_else_says_nothing_of_them(converted, hf, tmp_path):
    somebodys = converted("dcp-to-torch", converted("hf-to-dcp", hf, "dcp"), "torch")
    (file,) = somebodys.glob("*.pt")
    lone = file.rename(somebodys / "mine.pt")
    with open_native(lone, model_from=hf) as weights:
        assert origin_of(weights, tokenizer=hf).weights == weights_in(hf)


def test_a_tokenizer_is_its_tokens(hf, tmp_path):
    other = shutil.copytree(hf, tmp_path / "other")
    with open_native(hf) as weights:
        output = origin_of(weights, tokenizer=hf).tokenizer
        (other / "tokenizer_config.json").unlink()
        assert origin_of(weights, tokenizer=other).tokenizer == output
        content = json.loads((other / "tokenizer.json").read_text())
        (other / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": None}))
        assert origin_of(weights, tokenizer=other).tokenizer != output
