"""Text files and JSON lines to tokens on the disk: which documents, in which order, and the command itself."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from small_tokenizers import TEXT, write_beside, write_bpe, write_letters, write_word_pieces
from tokenizers import models

from jaxpipe.data import load_tokenizer
from jaxpipe.data.indexed import IndexedTokens
from jaxpipe.data.prepare import prepare
from jaxpipe.data.prepare.reading import find_files, read_blocks
from jaxpipe.data.prepare.vocabulary import sample_texts, train_vocabulary
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.prepare import format_prepared, main

ROOT = Path(__file__).parents[2]
ASTRAL = "Où est 東京? 😀 \u00a0 ½ don't\r\n\tx = 10**3  # _a_\nthe dog\n  the cat\n\n\n"


def documents_of(prefix: str) -> list[list[int]]:
    """The tokens of each document."""
    found = IndexedTokens.open(prefix)
    ends = np.concatenate([[0], np.cumsum(found.lengths[:])])[found.documents[:]]
    return [found.tokens[start:end].tolist() for start, end in pairwise(ends)]


def texts_in(prefix: str, tokenizer: str, *, is_masked: bool = False) -> Iterator[str]:
    """Each document decoded, without the separator that ends it."""
    loaded = load_tokenizer(tokenizer, is_masked=is_masked)
    for document in documents_of(prefix):
        assert document[-1] == loaded.separator
        yield loaded.decode(document[:-1])


def bytes_of(prefix: str) -> list[bytes]:
    return [Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")]


def test_a_file_is_a_document_and_files_come_in_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/1.txt", "a.txt", "c.txt", "b/0.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "c.md").write_text("no")
    prefix = str(tmp_path / "out" / "data")
    inputs = [str(tmp_path / "c.txt"), str(tmp_path / "**" / "*.txt")]
    prepared = prepare(inputs, tokenizer="byte", output=prefix)
    assert list(texts_in(prefix, "byte")) == ["a.txt", "b/0.txt", "b/1.txt", "c.txt"]
    assert (prepared.num_files, prepared.num_documents, prepared.num_tokens) == (4, 4, 28)
    assert prepared.notes.num_text_bytes == 24
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("name", ["text.jsonl", "text.json", "text.jsonl.gz", "wiki_00"])
def test_a_line_of_json_is_a_document(tmp_path, name):
    lines = "".join(json.dumps({"id": 3, "text": text}) + "\n" for text in [*TEXT, ASTRAL])
    data = b"\xef\xbb\xbf" + lines.replace("\n", "\r\n\n", 1).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    prefix = str(tmp_path / "data")
    form = "jsonl" if name == "wiki_00" else "auto"
    prepared = prepare([str(tmp_path / name)], tokenizer="byte", output=prefix, file_format=form)
    assert list(texts_in(prefix, "byte")) == [*TEXT, ASTRAL]
    assert prepared.notes.num_text_bytes == sum(len(text.encode()) for text in [*TEXT, ASTRAL])


def test_the_text_stands_under_another_key_and_text_may_be_zipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "one", "text": 3}')
    prepare([str(tmp_path / "a.jsonl")], tokenizer="byte", output=str(tmp_path / "a"), jsonl_key="content")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two"))
    prepare([str(tmp_path / "b.txt.gz")], tokenizer="byte", output=str(tmp_path / "b"))
    assert [*texts_in(str(tmp_path / "a"), "byte"), *texts_in(str(tmp_path / "b"), "byte")] == ["one", "two"]


@pytest.mark.parametrize("write", [write_bpe, write_word_pieces])
def test_tokens_are_those_of_the_tokenizer(tmp_path, write):
    file = write(tmp_path)
    for index, text in enumerate([*TEXT, "<|endoftext|>[SEP]", ASTRAL]):
        (tmp_path / f"{index}.txt").write_bytes(text.encode())
    prefix = str(tmp_path / "data")
    prepared = prepare([str(tmp_path / "*.txt")], tokenizer=str(tmp_path), output=prefix)
    tokenizer = load_tokenizer(str(file), is_masked=False)
    expected = [
        [*tokenizer.encode(text).tolist(), tokenizer.separator] for text in [*TEXT, "<|endoftext|>[SEP]", ASTRAL]
    ]
    assert documents_of(prefix) == expected
    assert Path(f"{prefix}.tokenizer.json").read_bytes() == file.read_bytes()
    assert prepared.tokenizer == f"{prefix}.tokenizer.json"
    assert prepared.vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_trained_vocabulary_gives_the_text_back(tmp_path, is_masked):
    for index, text in enumerate([*TEXT, ASTRAL]):
        (tmp_path / f"{index}.txt").write_bytes(text.encode())
    prefix = str(tmp_path / "data")
    prepared = prepare([f"{tmp_path}/*.txt"], tokenizer="bpe:300", output=prefix, is_masked=is_masked)
    assert list(texts_in(prefix, prepared.tokenizer, is_masked=is_masked)) == [*TEXT, ASTRAL]
    assert prepared.vocab_size == 300
    assert prepared.num_tokens < prepared.notes.num_text_bytes / 1.5  # it has learned these words
    masked = load_tokenizer(prepared.tokenizer, is_masked=is_masked).masked
    if masked is not None:
        special = [masked.padding, masked.classification, masked.separator, masked.mask]
        assert load_tokenizer(prepared.tokenizer, is_masked=True).decode(special) == "[PAD][CLS][SEP][MASK]"
        assert not masked.is_maskable[1]  # [UNK]
        assert masked.is_maskable[5:].all()


def test_parts_and_blocks_change_nothing(tmp_path, monkeypatch):
    """Blocks of a few bytes, so that there are many, and documents continue from one to the next."""
    file = write_bpe(tmp_path)
    monkeypatch.setattr("jaxpipe.data.prepare.reading.PART_BYTES", 100)
    monkeypatch.setattr("jaxpipe.data.prepare.reading.BLOCK_BYTES", 250)
    for index in range(12):
        (tmp_path / f"{index:02}.txt").write_bytes((TEXT[index % 6] + ASTRAL).encode() * (index * index % 7))
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT * 3))
    inputs = [f"{tmp_path}/*.txt", f"{tmp_path}/*.jsonl"]
    cut, whole = str(tmp_path / "cut"), str(tmp_path / "whole")
    assert len(list(read_blocks(find_files(inputs)))) > 10
    prepared = prepare(inputs, tokenizer=str(file), output=cut)
    monkeypatch.undo()
    assert prepare(inputs, tokenizer=str(file), output=whole).num_documents == prepared.num_documents == 28
    assert prepared.notes.empty.num == 2
    assert bytes_of(whole) == bytes_of(cut)


def test_training_gives_the_same_vocabulary_again():
    first, again = (train_vocabulary(TEXT * 5, vocab_size=400, is_masked=True).to_str() for _ in range(2))
    assert first == again
    names = [token["content"] for token in json.loads(first)["added_tokens"]]
    assert names == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def test_output_that_is_there_is_kept_unless_asked(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    arguments = {"tokenizer": str(write_bpe(tmp_path)), "output": str(tmp_path / "data")}
    prepare([f"{tmp_path}/a.txt"], **arguments)
    before = bytes_of(arguments["output"])
    (tmp_path / "a.txt").write_text("two")
    with pytest.raises(
        ConfigError, match=r"rule output-files: nothing.*\n *existing: .*data.bin, .*data.idx, .*data.token"
    ):
        prepare([f"{tmp_path}/a.txt"], **arguments)
    assert bytes_of(arguments["output"]) == before
    prepare([f"{tmp_path}/a.txt"], **arguments | {"tokenizer": "byte"}, overwrite=True)
    assert list(texts_in(arguments["output"], "byte")) == ["two"]
    assert not (tmp_path / "data.tokenizer.json").exists()


def test_output_that_could_not_be_named_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(ConfigError, match=r"contains a space\n *rule output-prefix"):
        prepare([f"{tmp_path}/a.txt"], tokenizer="byte", output=f"{tmp_path}/my data")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_large_text_is_sampled_from_its_beginning_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpipe.data.prepare.vocabulary.SAMPLE_BYTES", 2000)
    monkeypatch.setattr("jaxpipe.data.prepare.vocabulary.STRETCH_BYTES", 100)
    from jaxpipe.data.prepare.reading import find_files

    lines = [json.dumps({"text": f"{line:04}"}) + "\n" for line in range(1000)]
    (tmp_path / "0.jsonl").write_text("".join(lines[:700]))
    (tmp_path / "1.jsonl").write_text("".join(lines[700:]))
    found = [int(text) for text in sample_texts(find_files([f"{tmp_path}/*"]), key="text")]
    assert found == sorted(found)
    assert 60 <= len(found) <= 140  # 2000 bytes are 111 lines of 18; some are cut
    assert np.histogram(found, 10, range=(0, 1000))[0].min() >= 5
    with pytest.raises(DataError, match=r"0.jsonl:1 has no text under 'body'"):
        list(sample_texts(find_files([f"{tmp_path}/*"]), key="body"))


def test_the_command_tells_what_it_did_and_how_to_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYON_NUM_THREADS", "")  # which the command sets
    (tmp_path / "texts").mkdir()
    for index, text in enumerate([*TEXT, ""]):
        (tmp_path / "texts" / f"{index}.txt").write_text(text)
    (tmp_path / "texts" / "7.txt").write_bytes(b"caf\xe9")
    arguments = ["--input=texts/*.txt", "--tokenizer=bpe:290", "--output=data/cats", "--num_workers=2"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    num_tokens = IndexedTokens.open(str(tmp_path / "data" / "cats")).num_tokens
    num_bytes = sum(len(text.encode()) for text in TEXT) + len("caf\ufffd".encode())
    for line in [
        "training   a vocabulary of 290 tokens",
        "replaced   1 places of invalid UTF-8, by U+FFFD; the first in texts/7.txt",
        "left out   1 empty documents; the first in texts/6.txt",
        "documents  7",
        "vocabulary 290 tokens",
        f"tokens     {num_tokens}, uint16; {num_bytes / num_tokens:.2f} bytes a token",
        "written    data/cats.bin, data/cats.idx, data/cats.tokenizer.json",
        "train with --config.data.files=indexed:data/cats --config.data.tokenizer=data/cats.tokenizer.json"
        " --config.model.vocab_size=290",
    ]:
        assert line in out.splitlines()


def test_a_flag_that_is_missing_is_named(capsys):
    assert main(["--input=a", "--output=b"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ConfigError: --tokenizer is missing\n  rule flags: ")


@pytest.mark.ci
def test_a_process_ends_with_the_status_of_its_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxpipe.prepare", "--input=a", "--output=b"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ConfigError: --tokenizer is missing\n  rule flags: ")


def test_bytes_are_told_without_a_tokenizer_file(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    prepared = prepare([f"{tmp_path}/a.txt"], tokenizer="byte", output=f"{tmp_path}/my(data)", is_masked=True)
    lines = format_prepared(prepared).splitlines()
    assert lines[-2] == f"written    {tmp_path}/my(data).bin, {tmp_path}/my(data).idx"
    assert lines[-1].endswith("my(data)' --config.data.tokenizer=byte --config.model.vocab_size=260")
    assert len(lines) == 7


@pytest.mark.parametrize("form", ["text", "gzip"])
def test_one_long_line_and_one_compressed_file_are_sampled_as_evenly(tmp_path, monkeypatch, form):
    monkeypatch.setattr("jaxpipe.data.prepare.vocabulary.SAMPLE_BYTES", 2000)
    monkeypatch.setattr("jaxpipe.data.prepare.vocabulary.STRETCH_BYTES", 100)
    monkeypatch.setattr("jaxpipe.data.prepare.reading.PART_BYTES", 500)
    monkeypatch.setattr("jaxpipe.data.prepare.reading._TAIL_BYTES", 50)
    if form == "text":
        (tmp_path / "0.txt").write_text(" ".join(f"{place:05}" for place in range(20_000)))
    else:
        numbers = np.random.default_rng(0).permutation(200_000).tolist()  # so that they are not compressed to nothing
        with gzip.open(tmp_path / "0.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": f"{place:06} {number}"}) + "\n" for place, number in enumerate(numbers))
    texts = [text.split() for text in sample_texts(find_files([f"{tmp_path}/*"]), key="text")]
    most, words = (20_000, None) if form == "text" else (200_000, 1)
    found = [int(word) for text in texts for word in text[:words] if len(word) >= 5]
    assert len(set(found)) == len(found)
    assert np.histogram(found, 5, range=(0, most))[0].min() >= 5


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("files", "separator", "ends"),
    [
        ({}, "<|endoftext|>, by its usual name; a generated text ends at <|endoftext|>", QWEN[:1]),
        (
            {"tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<none>"}},
            "<|im_end|>, by eos_token of its files; a generated text ends at <|im_end|>",
            QWEN[2:],
        ),
        (
            {"generation_config": {"eos_token_id": [1, 0]}},
            "<|im_start|>, by eos_token_id of generation_config.json; a generated text ends at <|im_start|> or"
            " <|endoftext|>",
            (QWEN[1], QWEN[0]),
        ),
        (
            {"tokenizer_config": {"eos_token": "<none>"}},
            "<|endoftext|>, by its usual name, since eos_token '<none>' is not in the vocabulary; a generated text ends"
            " at <|endoftext|>",
            QWEN[:1],
        ),
        (
            {"tokenizer_config": {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}},
            "<|endoftext|>, by eos_token of its files; a generated text ends at <|endoftext|> or <|im_end|>",
            (QWEN[0], QWEN[2]),
        ),
        (
            {
                "tokenizer_config": {
                    "eos_token": "<|endoftext|>",
                    "chat_template": TEMPLATE.replace("\n", "<|im_start|>"),
                }
            },
            "<|endoftext|>, by eos_token of its files; a generated text ends at <|endoftext|> or <|im_end|>",
            (QWEN[0], QWEN[2]),
        ),
        (
            {"tokenizer_config": {"eos_token": "<|endoftext|>", "chat_template": "{% for"}},
            "<|endoftext|>, by eos_token of its files; a generated text ends at <|endoftext|>",
            QWEN[:1],
        ),
    ],
)
def test_prepared_files_end_texts_as_the_folder_of_their_tokenizer(tmp_path, capsys, files, separator, ends):
    """Their own copy of the tokenizer stands in another folder."""
    (tmp_path / "q").mkdir()
    write_letters(tmp_path / "q", special=QWEN, words=("a word",))
    write_beside(tmp_path / "q", **files)
    (tmp_path / "a.txt").write_text("one")
    prefix = f"{tmp_path}/out/data"
    arguments = [f"--input={tmp_path}/a.txt", f"--output={prefix}", f"--tokenizer={tmp_path}/q"]
    assert main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"separator  {separator}" in said
    missing = "missing    <none>: its files name them, tokenizer.json has no such tokens"
    assert (missing in said) == ("<none>" in str(files))
    written = load_tokenizer(f"{prefix}.tokenizer.json", is_masked=False)
    assert tuple(written.decode([token]) for token in written.ends) == ends
    assert written.identity == load_tokenizer(f"{tmp_path}/q", is_masked=False).identity
    assert documents_of(prefix)[0][-1] == written.separator
    # Of another tokenizer nothing stays.
    (tmp_path / "plain").mkdir()
    write_letters(tmp_path / "plain", special=QWEN)
    assert main([*arguments[:2], f"--tokenizer={tmp_path}/plain", "--overwrite"]) == 0
    assert load_tokenizer(f"{prefix}.tokenizer.json", is_masked=False).ends == (0,)


def write_without_pairs(folder: Path, *, unknown: str | None) -> Path:
    model = models.BPE(vocab={"a": 0, "b": 1, "?": 2, "</s>": 3}, merges=[], unk_token=unknown)
    library = tokenizers.Tokenizer(model)
    library.add_special_tokens(["</s>"])
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_characters_that_the_vocabulary_lacks_are_refused_dropped_or_unknown(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab" * 400 + "é" * 300 + "東" * 200)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "aéb"}))
    arguments = [f"--input={tmp_path}/a.txt", f"--input={tmp_path}/b.jsonl", f"--output={tmp_path}/out/data"]
    file = write_without_pairs(tmp_path, unknown=None)
    assert main([*arguments, f"--tokenizer={file}"]) == 2
    said = capsys.readouterr().err
    assert "lacks 2 characters of the text\n  rule tokenizer-characters: " in said
    assert "      'é' U+00E9 301 times, '東' U+6771 200 times\n  repair: name another" in said
    assert not list((tmp_path / "out").glob("data*"))
    assert main([*arguments, f"--tokenizer={file}", "--drop_characters"]) == 0
    assert "dropped    501 characters: 'é' U+00E9 301 times, '東' U+6771 200 times" in capsys.readouterr().out
    assert documents_of(f"{tmp_path}/out/data") == [[0, 1] * 400 + [3], [0, 1, 3]]
    file = write_without_pairs(tmp_path, unknown="?")
    os.utime(file, ns=(7, 7))
    assert main([*arguments, f"--tokenizer={file}", "--overwrite"]) == 0
    said = capsys.readouterr().out
    assert f"unknown    501 tokens stand for what the vocabulary lacks; the first in {tmp_path}/a.txt\n" in said
    assert "dropped" not in said
    assert documents_of(f"{tmp_path}/out/data")[1] == [0, 2, 1, 3]
