"""torch.compile for inference: one function for many shapes, and never in pieces."""

import pytest
import torch

from titan_tools.infer.model.compiling import compile_all_shapes


@pytest.fixture(autouse=True)
def torchs_own_limit():
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


def test_more_shapes_than_torch_allows_by_itself():
    shapes = []

    def doubled(x):
        return x * 2

    def backend(graph, inputs):
        shapes.append(inputs[0].shape)
        return graph

    compiled = compile_all_shapes(doubled, backend=backend)
    for length in range(2, 12):
        assert compiled(torch.ones(length)).tolist() == [2.0] * length
    assert len(shapes) == 10  # a kernel for each: none for any length


def test_a_function_in_pieces_is_an_error():
    def looks_at_values(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_all_shapes(looks_at_values, backend="eager")(torch.ones(3))
