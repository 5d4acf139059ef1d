"""A run goes on with the tokens that it began with, or says which source is another."""

from dataclasses import replace

import pytest

from jaxpipe.config import base_config
from jaxpipe.data import Fingerprint
from jaxpipe.data.fingerprint import SourceFingerprint
from jaxpipe.errors import ConfigError
from jaxpipe.training import run_folder
from jaxpipe.training.batches import read_corpus
from jaxpipe.training.resume import config_changes
from jaxpipe.training.same_data import DATA, check_same_as_first, check_same_data, write_fingerprint

BOOKS = SourceFingerprint("data/books", "3/10", 2000, "0badcafe")
BEFORE = Fingerprint(256, "byte", (SourceFingerprint("data/wiki", "7/10", 1000, "00c0ffee"), BOOKS))


@pytest.fixture
def run(tmp_path):
    """The folder of a run on its text, and its config."""
    (tmp_path / "text.txt").write_text("the same words again and again. " * 100)
    config = base_config()
    config.data.update({"files": str(tmp_path / "*.txt"), "seq_len": 8, "batch_size": 4})
    path = tmp_path / "run"
    path.mkdir()
    run_folder.write_config(path, config)
    write_fingerprint(path, read_corpus(config).fingerprint)
    return path, config


def test_the_same_text_under_another_name_goes_on_and_is_said(run, tmp_path):
    path, config = run
    (tmp_path / "text.txt").rename(tmp_path / "moved.md")
    config.data.files = f"{tmp_path}/*.md"
    check_same_data(path, read_corpus(config).fingerprint)
    assert config_changes(path, config) == [f"data.files: {tmp_path}/*.txt -> {tmp_path}/*.md"]


def test_a_file_more_under_the_same_name_is_an_error(run, tmp_path):
    path, config = run
    check_same_data(path, read_corpus(config).fingerprint)
    (tmp_path / "more.txt").write_text("more")
    assert config_changes(path, config) == []
    # 100 x 32 bytes and 4 bytes, each with its end.
    with pytest.raises(
        ConfigError,
        match=r"^data\.files are other tokens than those with which the run in --workdir=.*/run began\n"
        r"  rule same-data: .*\n"
        r"      before source 1: '.*/\*\.txt', 3,201 tokens, crc32 [0-9a-f]{8}, 1 of a batch\n"
        r"      now    source 1: '.*/\*\.txt', 3,206 tokens, crc32 [0-9a-f]{8}, 1 of a batch\n"
        r"  repair: ",
    ):
        check_same_data(path, read_corpus(config).fingerprint)


@pytest.mark.parametrize("field", ["files", "tokenizer"])
def test_a_run_of_an_older_version_goes_on_by_the_names_alone(run, field):
    path, config = run
    (path / DATA).unlink()
    check_same_data(path, BEFORE)
    assert config_changes(path, config) == []
    config.data[field] = "other"
    with pytest.raises(ConfigError, match=rf"rule same-run(?s:.*)data\.{field}: .* -> other"):
        config_changes(path, config)


@pytest.mark.parametrize(("field", "value"), [("seed", 3), ("seq_len", 16), ("heldout_fraction", 0.2)])
def test_what_orders_the_tokens_stays_fixed(run, field, value):
    path, config = run
    config.data[field] = value
    with pytest.raises(ConfigError, match=rf"rule same-run(?s:.*)data\.{field}: "):
        config_changes(path, config)


def test_what_was_written_is_read_and_replaced_in_one_piece(tmp_path):
    write_fingerprint(tmp_path, BEFORE)
    write_fingerprint(tmp_path, BEFORE)
    check_same_data(tmp_path, BEFORE)
    assert [file.name for file in tmp_path.iterdir()] == [DATA]


@pytest.mark.parametrize("text", ["", "{", "{}", '{"sources": [{"name": "a"}]}'])
def test_a_damaged_file_is_no_silent_start(tmp_path, text):
    (tmp_path / DATA).write_text(text)
    with pytest.raises(ConfigError, match=r"data\.json cannot be read: (?s:.*)rule data-file(?s:.*)repair: "):
        check_same_data(tmp_path, BEFORE)


def test_another_vocabulary_is_an_error_of_the_tokenizer_alone(tmp_path):
    write_fingerprint(tmp_path, BEFORE)
    with pytest.raises(ConfigError) as error:
        check_same_data(tmp_path, replace(BEFORE, vocab_size=260))
    assert "      before tokenizer: 256 tokens, byte\n      now    tokenizer: 260 tokens, byte\n" in str(error.value)
    assert "source" not in str(error.value)


def test_of_many_sources_five_are_shown(tmp_path):
    write_fingerprint(tmp_path, replace(BEFORE, sources=(BOOKS,) * 8))
    with pytest.raises(ConfigError, match=r"now    source 5: none\n      and 3 more\n"):
        check_same_data(tmp_path, replace(BEFORE, sources=()))


def test_the_process_that_reads_other_text_is_named_with_the_source():
    check_same_as_first(BEFORE.to_json(), BEFORE, process=3)
    other = replace(BEFORE, sources=(BEFORE.sources[0], replace(BOOKS, name="/scratch/books", num_tokens=1999)))
    with pytest.raises(
        ConfigError,
        match=r"^data\.files: process 3 reads other tokens than process 0\n"
        r"  rule same-data: .*\n"
        r"      process 0 source 2: 'data/books', 2,000 tokens, crc32 0badcafe, 3/10 of a batch\n"
        r"      process 3 source 2: '/scratch/books', 1,999 tokens, crc32 0badcafe, 3/10 of a batch\n"
        r"  repair: ",
    ):
        check_same_as_first(BEFORE.to_json(), other, process=3)
