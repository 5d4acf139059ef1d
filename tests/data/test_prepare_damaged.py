"""Input that is damaged, empty or not there: an error that names file and line, or a replacement that is told."""

import gzip
import json
from pathlib import Path

import pytest
from small_tokenizers import write_bpe

from jaxpipe.data import load_tokenizer
from jaxpipe.data.indexed import IndexedTokens
from jaxpipe.data.prepare import prepare
from jaxpipe.data.prepare.encoding import Tally
from jaxpipe.data.prepare.reading import find_files, read_blocks
from jaxpipe.errors import ConfigError, DataError

GOOD = '{"text": "good"}\n'


def prepared_bytes(folder: Path, *, tokenizer: str = "byte", **options):
    prepared = prepare([str(folder / "in*")], tokenizer=tokenizer, output=str(folder / "data"), **options)
    return prepared, IndexedTokens.open(str(folder / "data")).tokens[:]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": "cut o', r"is not JSON\n  rule jsonl: (.|\n)*Unterminated string.*: {\"text\": \"cut o\n"),
        ("plain text", r"is not JSON\n(.|\n)*--format=text takes a file that is plain text"),
        ("[" * 100_000, r"is not JSON\n"),
        ('{"title": "a", "body": "b"}', r"has no text under 'text'\n(.|\n)*its keys: title, body\n.*--jsonl_key"),
        ('{"text": 3}', r"has no text under 'text'\n(.|\n)*found {\"text\": 3}; its keys: text\n"),
        ("{}", r"has no text under 'text'\n(.|\n)*found {}; its keys: \n"),
        ('["text"]', r"has no text under 'text'\n(.|\n)*found \[\"text\"\]\n"),
    ],
)
@pytest.mark.parametrize("part_bytes", [10, 2**22])
def test_a_damaged_line_is_named_and_nothing_is_written(tmp_path, monkeypatch, line, what, part_bytes):
    monkeypatch.setattr("jaxpipe.data.prepare.reading.PART_BYTES", part_bytes)
    (tmp_path / "in.jsonl").write_text(GOOD * 7 + "\n" + line + "\n" + GOOD * 3)
    with pytest.raises(DataError, match=rf"^{tmp_path}/in.jsonl:9 {what}"):
        prepared_bytes(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_zipped_file_that_is_cut_off_is_named(tmp_path):
    packed = gzip.compress(GOOD.encode() * 1000)
    for data in (packed[:-20], b"no gzip", packed[:30] + b"\xff" * 20 + packed[50:]):
        (tmp_path / "in.jsonl.gz").write_bytes(data)
        with pytest.raises(
            DataError, match=r"in.jsonl.gz cannot be read\n  rule input-readable: .*decompressed to its end"
        ):
            prepared_bytes(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("text")

    def refuse(path: Path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    files = find_files([f"{tmp_path}/in.txt"])
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"in.txt cannot be read\n  rule input-readable.*\n *Permission denied"):
        list(read_blocks(files))


def test_bytes_that_are_no_text_stay_for_bytes_and_are_replaced_and_counted_for_others(tmp_path):
    (tmp_path / "in1.txt").write_bytes("the cat, \ufffd".encode())
    (tmp_path / "in2.txt").write_bytes(b"the \xff\xfe cat \xc3")
    prepared, tokens = prepared_bytes(tmp_path)
    assert bytes(tokens.astype("u1")) == "the cat, \ufffd".encode() + b"\0the \xff\xfe cat \xc3\0"
    assert prepared.notes.replaced == Tally(0)

    file = str(write_bpe(tmp_path))
    prepared, tokens = prepared_bytes(tmp_path, tokenizer=file, overwrite=True)
    assert prepared.notes.replaced == Tally(3, f"{tmp_path}/in2.txt")
    expected = "the cat, \ufffd<|endoftext|>the \ufffd\ufffd cat \ufffd<|endoftext|>"
    assert load_tokenizer(file, is_masked=False).decode(tokens) == expected


def test_lines_are_text_for_bytes_too(tmp_path):
    """JSON is UTF-8, so there are no other bytes to keep; it can spell half a character, which UTF-8 cannot."""
    (tmp_path / "in.jsonl").write_bytes(GOOD.encode() + b'{"text": "a\xff"}\n{"text": "\\ud83d\\ude00\\ud800"}')
    prepared, tokens = prepared_bytes(tmp_path)
    assert bytes(tokens.astype("u1")).decode() == "good\0a\ufffd\0😀\ufffd\0"
    assert prepared.notes.replaced == Tally(2, f"{tmp_path}/in.jsonl:2")


def test_empty_files_and_texts_are_left_out_and_counted(tmp_path):
    for name, text in {"in1.txt": "", "in2.txt": "a", "in3.jsonl": f"\n{json.dumps({'text': ''})}\n{GOOD}"}.items():
        (tmp_path / name).write_text(text)
    prepared, tokens = prepared_bytes(tmp_path)
    assert bytes(tokens.astype("u1")) == b"a\0good\0"
    assert prepared.notes.empty == Tally(2, f"{tmp_path}/in1.txt")
    assert prepared.num_documents == 2


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_files_without_any_text_are_an_error(tmp_path, tokenizer):
    for name in ("in1.txt", "in2.jsonl", "in3.jsonl"):
        (tmp_path / name).write_text("\n" if name == "in3.jsonl" else "")
    with pytest.raises(DataError, match=rf"no text in 3 files\n  rule input-text(.|\n)*first: {tmp_path}/in1.txt, 0 b"):
        prepared_bytes(tmp_path, tokenizer=tokenizer)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_text_without_a_place_to_cut_is_cut_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpipe.data.prepare.reading.PART_BYTES", 100)
    text = "東京 " + "東京" * 200 + "\xe9" * 99
    (tmp_path / "in.txt").write_text(text)
    blocks = list(read_blocks(find_files([f"{tmp_path}/in.txt"])))
    parts = [part for block in blocks for part in block]
    assert len(parts) > 10
    assert "".join(part.data.decode() for part in parts) == text
    assert [part.is_end for part in parts] == [False] * (len(parts) - 1) + [True]
    assert max(len(part.data) for part in parts) < 210
    assert sum(part.num_read_bytes for part in parts) == (tmp_path / "in.txt").stat().st_size


@pytest.mark.parametrize("tokenizer", ["bpe:", "bpe:many", "bpe:-1", "bpe:257", "bpe:1e4"])
def test_a_size_that_is_none_says_the_smallest(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"rule vocabulary-size(.|\n)*<\|endoftext\|>\n *repair: .* at least 258"):
        prepared_bytes(tmp_path, tokenizer=tokenizer)


def test_no_file_is_an_error_and_a_folder_has_its_repair(tmp_path):
    with pytest.raises(ConfigError, match=rf"--input={tmp_path}/in\* names no file\n  rule input-files"):
        prepared_bytes(tmp_path)
    (tmp_path / "in").mkdir()
    with pytest.raises(ConfigError, match=rf"repair: name --input='{tmp_path}/in/\*\*'"):
        prepare([f"{tmp_path}/in/"], tokenizer="byte", output=f"{tmp_path}/data")
    with pytest.raises(ConfigError, match="rule tokenizer-file"):
        prepare([__file__], tokenizer=f"{tmp_path}/none.json", output=f"{tmp_path}/data")
