"""What may stand behind "indexed:"."""

from fractions import Fraction

import pytest

from jaxpipe.config import base_config, check
from jaxpipe.config.data import check_blend
from jaxpipe.data.files import parse_blend
from jaxpipe.errors import ConfigError


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        ("indexed:a/b", {"a/b": 1}),
        ("indexed: a", {"a": 1}),
        ("indexed:0.7 a 0.3 b", {"a": Fraction(7, 10), "b": Fraction(3, 10)}),
        ("indexed:2 a 1e-3 b  12 c", {"a": 2, "b": Fraction(1, 1000), "c": 12}),
    ],
)
def test_weights_are_the_numbers_that_are_written(files, weights):
    assert parse_blend(files) == weights


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ("indexed:", "0 words"),
        ("indexed:0.7 a 0.3", "3 words"),
        ("indexed:a b", "'a' is not a positive number"),
        ("indexed:a 0.7 b 0.3", "'a' is not a positive number"),
        ("indexed:1 a 0 b", "'0' is not a positive number"),
        ("indexed:-1 a 2 b", "'-1' is not a positive number"),
        ("indexed:nan a 2 b", "'nan' is not a positive number"),
        ("indexed:inf a 2 b", "'inf' is not a positive number"),
        ("indexed:1/0 a 2 b", "'1/0' is not a positive number"),
        ("indexed:1 a 2 a", "a occurs 2 times"),
    ],
)
def test_anything_else_is_an_error_that_shows_both_forms(files, found):
    with pytest.raises(ConfigError, match="rule blend") as error:
        parse_blend(files)
    assert f"found: {found}\n" in str(error.value)
    assert "indexed:PREFIX or indexed:0.7 PREFIX 0.3 PREFIX" in str(error.value)


def test_a_config_is_checked_before_any_file_is_opened():
    config = base_config()
    config.data.files = "indexed:0.5 nowhere 0.5"
    with pytest.raises(ConfigError, match="rule blend"):
        check_blend(config)
    config.data.files = "indexed:nowhere"
    check_blend(config)
    check(config)
