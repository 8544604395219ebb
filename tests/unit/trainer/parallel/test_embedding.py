"""The tensor-parallel embedding takes the place of a plain one only; that it gives the same is tests/dist's to say."""

import pytest
from torch import nn

from converters.common.errors import UnsupportedError
from trainer.parallel.embedding import RowsOfVocabulary


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * 2


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (Scaled(8, 4), "Scaled overrides forward"),
        (nn.Embedding(8, 4, padding_idx=0), "padding_idx = 0"),
        (nn.Embedding(8, 4, max_norm=1.0, sparse=True), "max_norm = 1.0; sparse = True"),
    ],
)
def test_an_embedding_that_does_more_than_look_up_is_refused(embedding, message):
    with pytest.raises(UnsupportedError, match=message):
        RowsOfVocabulary()._apply(embedding, None)
