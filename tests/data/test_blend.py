"""What may stand behind "indexed:"."""

from fractions import Fraction
from pathlib import Path

import pytest
import tokenizers
from small_tokenizers import write_bpe

from jaxpipe.config import base_config, check
from jaxpipe.config.data import check_blend, check_prepared_tokenizer
from jaxpipe.data.files import parse_blend
from jaxpipe.data.prepare import prepare
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


# ---- The tokenizers of prepared files


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Files a, b, of one tokenizer; c of another, byte of bytes, and same.json, that of a saved again."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The cat sat on the mat. " * 9)
    for folder in ("one", "other"):
        Path(folder).mkdir()
    one, other = write_bpe(tmp_path / "one"), write_bpe(tmp_path / "other", special=("</s>",))
    for output, tokenizer in {"a": one, "b": one, "c": other, "byte": "byte"}.items():
        prepare(["text.txt"], tokenizer=str(tokenizer), output=output)
    tokenizers.Tokenizer.from_file("a.tokenizer.json").save("same.json", pretty=False)


def check_tokenizers(files: str, tokenizer: str) -> None:
    config = base_config()
    config.data.files, config.data.tokenizer = files, tokenizer
    check_prepared_tokenizer(config)


@pytest.mark.parametrize(
    ("files", "tokenizer"),
    [
        ("indexed:a", "a.tokenizer.json"),
        ("indexed:a", "same.json"),
        ("indexed:1 a 2 b", "same.json"),
        ("indexed:byte", "byte"),
        ("indexed:byte", "a.tokenizer.json"),  # as data of Megatron-LM, it has no tokenizer beside it
        ("indexed:nothing", "a.tokenizer.json"),  # an error of its own
        ("text.txt", "c.tokenizer.json"),
    ],
)
def test_the_tokenizer_of_prepared_files_may_be_any_copy(prepared, files, tokenizer):
    check_tokenizers(files, tokenizer)


@pytest.mark.parametrize(
    ("files", "tokenizer", "other"),
    [
        ("indexed:a", "c.tokenizer.json", "a"),
        ("indexed:a", "byte", "a"),
        ("indexed:1 a 1 c", "a.tokenizer.json", "c"),
        ("indexed:1 a 1 c", "c.tokenizer.json", "a"),
        ("indexed:1 a 1 byte", "a.tokenizer.json", "byte"),
    ],
)
def test_prepared_files_of_another_tokenizer_are_refused(prepared, files, tokenizer, other):
    with pytest.raises(ConfigError, match=r"\n  rule prepared-tokenizer: ") as error:
        check_tokenizers(files, tokenizer)
    assert f"data.files: '{other}' was not prepared with data.tokenizer='{tokenizer}'" in str(error.value)
    assert f"      {other}.tokenizer.json: " in str(error.value)
