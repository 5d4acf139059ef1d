"""A token that is no word is found when it is read, and not before."""

import numpy as np
import pytest

from jaxpipe.data.known_tokens import KnownTokens
from jaxpipe.errors import DataError


def test_tokens_of_the_vocabulary_come_as_they_are():
    tokens = KnownTokens(np.array([0, 4, 9], np.uint16), "x.bin", vocab_size=10)
    assert len(tokens) == 3
    assert tokens[np.array([[2, 0], [1, 1]])].tolist() == [[9, 0], [4, 4]]
    assert tokens[np.array([], np.int64)].tolist() == []


@pytest.mark.parametrize("token", [10, 50256, -1])
def test_another_is_named_with_its_place_and_the_file(token):
    tokens = KnownTokens(np.array([0, 4, 9, token, 5], np.int32), "data/x.bin", vocab_size=10)
    tokens[np.array([0, 1, 2, 4])]
    with pytest.raises(DataError, match=rf"^data/x.bin: token {token} at place 3 is no word\n") as error:
        tokens[np.array([[0, 1], [3, 3]])]
    assert "vocab_size=10: words 0 .. 9" in str(error.value)
