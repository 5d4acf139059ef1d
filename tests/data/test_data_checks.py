"""Rules of `data`: a vocabulary for every token, sequences that hold what a masked model needs."""

import pytest
from small_tokenizers import write_beside, write_bpe, write_letters

from jaxpipe.config import base_config, check
from jaxpipe.config.base import RunConfig
from jaxpipe.config.data import check_masked_sequence, check_prepared_tokenizer, check_vocabulary
from jaxpipe.data import load_tokenizer
from jaxpipe.data.masked import MIN_SEQ_LEN
from jaxpipe.data.prepare import prepare
from jaxpipe.errors import ConfigError
from jaxpipe.models import FAMILIES


def config_of(*, family="gpt", vocab_size=256, seq_len=64, tokenizer="byte"):
    fields = {"model.vocab_size": vocab_size, "data.seq_len": seq_len, "data.tokenizer": tokenizer}
    return RunConfig.of(base_config(family)).replaced(fields)


@pytest.mark.parametrize(("family", "needed"), [("gpt", 256), ("llama", 256), ("bert", 260)])
def test_a_vocabulary_holds_all_bytes_and_what_a_masked_model_needs_besides(family, needed):
    check_vocabulary(config_of(family=family, vocab_size=needed))
    with pytest.raises(ConfigError, match="rule vocabulary") as error:
        check_vocabulary(config_of(family=family, vocab_size=needed - 1))
    for word in [f"vocab_size={needed - 1} ", f"{family}: tokens 0 .. {needed - 1}", f"vocab_size={needed}"]:
        assert word in str(error.value)


def test_a_vocabulary_holds_all_words_of_the_tokenizer(tmp_path):
    path = str(write_bpe(tmp_path))
    needed = load_tokenizer(path, is_masked=False).vocab_size
    check_vocabulary(config_of(vocab_size=needed, tokenizer=path))
    with pytest.raises(ConfigError, match=rf"repair: set model.vocab_size={needed}$"):
        check_vocabulary(config_of(vocab_size=needed - 1, tokenizer=path))
    with pytest.raises(ConfigError, match="rule tokenizer-file"):
        check_vocabulary(config_of(tokenizer=f"{path}.nowhere"))


def test_prepared_documents_end_as_the_tokenizer_says(tmp_path):
    """Both have the same vocabulary; the files beside one of them name another end."""
    for name, files in {"named": {"tokenizer_config": {"eos_token": "<|im_end|>"}}, "plain": {}}.items():
        (tmp_path / name).mkdir()
        write_letters(tmp_path / name, special=("<|endoftext|>", "<|im_end|>"))
        write_beside(tmp_path / name, **files)
    (tmp_path / "a.txt").write_text("one")
    prefix = f"{tmp_path}/data"
    prepare([f"{tmp_path}/a.txt"], tokenizer=f"{tmp_path}/named", output=prefix)

    def config_with(tokenizer):
        config = base_config("gpt")
        config.data.update({"files": f"indexed:{prefix}", "tokenizer": tokenizer})
        return config

    for tokenizer in (f"{tmp_path}/named", f"{prefix}.tokenizer.json"):
        check_prepared_tokenizer(config_with(tokenizer))
    with pytest.raises(ConfigError, match=r"rule prepared-end(.|\n)*plain': <\|endoftext\|>\n.*json: <\|im_end\|>"):
        check_prepared_tokenizer(config_with(f"{tmp_path}/plain"))


def test_a_masked_sequence_holds_two_segments():
    assert [name for name, family in FAMILIES.items() if family.masked] == ["bert"]
    assert len(["[CLS]", "A", "[SEP]", "B", "[SEP]"]) == MIN_SEQ_LEN
    check_masked_sequence(config_of(family="bert", seq_len=5))
    check_masked_sequence(config_of(family="gpt", seq_len=4))
    with pytest.raises(ConfigError, match=r"rule masked-sequence(.|\n)*repair: set data.seq_len=5 or more"):
        check_masked_sequence(config_of(family="bert", seq_len=4))


def test_masked_families_alone_have_fields_of_masking():
    assert set(base_config("bert").data) - set(base_config("gpt").data) == {"mask_fraction", "short_fraction"}
    assert set(base_config("llama").data) == set(base_config("gpt").data)


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("mask_fraction", 0.0, "more than 0"),
        ("mask_fraction", 1.1, "at most 1.0"),
        ("short_fraction", -0.1, "0 or more"),
        ("short_fraction", 1.1, "at most 1.0"),
    ],
)
def test_fractions_are_parts_of_a_whole(field, value, bound):
    config = base_config("bert")
    config.data[field] = value
    with pytest.raises(ConfigError, match=rf"^1 rule broken.*\n.*\n.*field-range: data.{field} is {bound}\n"):
        check(config)
