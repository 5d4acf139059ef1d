"""Megatron-LM's indexed format, byte for byte as its description has it, both ways."""

import errno
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxpipe.data import indexed_writer
from jaxpipe.data.indexed import IndexedTokens
from jaxpipe.data.indexed_writer import write_indexed
from jaxpipe.errors import DataError

# Two documents: (7, 8, 9) of one sequence and (10, 11 | 65000) of two, packed by hand as
# megatron/core/datasets/indexed_dataset.py writes them: IndexedDatasetBuilder.add_document, then finalize.
TOKENS = [7, 8, 9, 10, 11, 65000]
BIN = struct.pack("<6H", *TOKENS)
IDX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<Q", 1)  # version
    + struct.pack("<B", 8)  # uint16
    + struct.pack("<Q", 3)  # sequences
    + struct.pack("<Q", 3)  # ends of documents, with the 0 before the first
    + struct.pack("<3i", 3, 2, 1)  # tokens of each
    + struct.pack("<3q", 0, 6, 10)  # first byte of each
    + struct.pack("<3q", 0, 1, 3)  # ends of documents
)
# The same tokens, one sequence a document.
IDX_OF_TWO = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<QBQQ", 1, 8, 2, 3)
    + struct.pack("<2i", 3, 3)
    + struct.pack("<2q", 0, 6)
    + struct.pack("<3q", 0, 1, 2)
)


def write(folder: Path, tokens: bytes = BIN, index: bytes = IDX) -> str:
    (folder / "data.bin").write_bytes(tokens)
    (folder / "data.idx").write_bytes(index)
    return str(folder / "data")


def test_reads_what_megatron_writes(tmp_path):
    found = IndexedTokens.open(write(tmp_path))
    assert found.tokens[:].tolist() == TOKENS
    assert (found.num_tokens, found.num_documents, found.dtype) == (6, 2, np.dtype("<u2"))
    assert found.lengths[:].tolist() == [3, 2, 1]
    assert found.documents[:].tolist() == [0, 1, 3]


def test_writes_what_megatron_reads(tmp_path):
    prefix = str(tmp_path / "data")
    with write_indexed(prefix, vocab_size=65499) as writer:
        writer.add(np.array([7, 8]), is_open=True)
        writer.add(np.array([9, 10, 11, 65000]), np.array([1, 3]))
    assert Path(f"{prefix}.bin").read_bytes() == BIN
    assert Path(f"{prefix}.idx").read_bytes() == IDX_OF_TWO


def test_a_document_too_long_for_one_sequence_has_several(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_writer, "MAX_LENGTH", 3)
    with write_indexed(str(tmp_path / "data"), vocab_size=100) as writer:
        writer.add(np.arange(11), np.array([3, 7, 0, 1]), is_open=True)
        writer.add(np.arange(5), np.array([3, 2]))
    found = IndexedTokens.open(str(tmp_path / "data"))
    assert found.lengths[:].tolist() == [3, 3, 3, 1, 0, 3, 1, 2]
    assert found.documents[:].tolist() == [0, 1, 4, 5, 7, 8]


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "code"), [(256, "<u2", 8), (65499, "<u2", 8), (65500, "<i4", 4), (200_000, "<i4", 4)]
)
def test_the_dtype_is_megatrons_for_the_vocabulary(tmp_path, vocab_size, dtype, code):
    tokens = np.array([0, vocab_size - 1])
    with write_indexed(str(tmp_path / "data"), vocab_size=vocab_size) as writer:
        writer.add(tokens)
    assert (tmp_path / "data.bin").read_bytes() == tokens.astype(dtype).tobytes()
    assert (tmp_path / "data.idx").read_bytes()[17] == code
    assert IndexedTokens.open(str(tmp_path / "data")).tokens[:].tolist() == tokens.tolist()


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_reads_every_integer_dtype(tmp_path, code, letter):
    size = struct.calcsize(letter)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 2, 2) + struct.pack("<2i2q2q", 1, 2, 0, size, 0, 2)
    found = IndexedTokens.open(write(tmp_path, struct.pack(f"<3{letter}", 1, 2, 100), index))
    assert found.tokens[:].tolist() == [1, 2, 100]


def test_many_random_documents_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_writer, "_BLOCK", 3)
    monkeypatch.setattr("jaxpipe.data.indexed.BLOCK_SEQUENCES", 7)
    random = np.random.default_rng(0)
    documents = [random.integers(0, 1000, size) for size in random.integers(0, 50, 300)]
    with write_indexed(str(tmp_path / "data"), vocab_size=1000) as writer:
        for start in range(0, 300, 20):
            group = documents[start : start + 20]
            writer.add(np.concatenate(group), np.array([len(one) for one in group]))
    found = IndexedTokens.open(str(tmp_path / "data"))
    ends = np.concatenate([[0], np.cumsum(found.lengths[:])])[found.documents[:]]
    for one, start, end in zip(documents, ends[:-1], ends[1:], strict=True):
        np.testing.assert_array_equal(found.tokens[start:end], one)


def test_another_process_gets_the_prefix_and_not_the_tokens(tmp_path):
    found = IndexedTokens.open(write(tmp_path, b"\1" * 20_000, IDX_OF_TWO.replace(*_longer(20_000))))
    pickled = pickle.dumps(found)
    assert len(pickled) < 1000
    np.testing.assert_array_equal(pickle.loads(pickled).tokens[:], found.tokens[:])


def _longer(num_bytes: int) -> tuple[bytes, bytes]:
    """The lengths of two sequences of three tokens, and of two where the second fills `num_bytes`."""
    return struct.pack("<2i", 3, 3), struct.pack("<2i", 3, num_bytes // 2 - 3)


def test_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with write_indexed("~/data", vocab_size=9) as writer:
        writer.add(np.array([1]))
    assert IndexedTokens.open("~/data").num_tokens == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


def test_nothing_is_left_of_an_error_and_what_was_there_stays(tmp_path):
    prefix = write(tmp_path)
    with (
        pytest.raises(DataError, match=r"tokens from 5 to 9\n  rule vocabulary"),
        write_indexed(prefix, vocab_size=9, beside={".tokenizer.json": b"{}"}) as writer,
    ):
        writer.add(np.array([5, 9]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
    assert (tmp_path / "data.bin").read_bytes() == BIN


def test_a_disk_that_is_full_at_once_leaves_nothing(tmp_path):
    def fill() -> None:
        with write_indexed(str(tmp_path / "data"), vocab_size=9) as writer:
            writer.add(np.zeros(90_000, int))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DataError, match=r"data.bin cannot be written\n(.|\n)*while writing: No space left on device"):
        fill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    """A limit on the size of files stands for the disk: writing beyond it fails in the same place."""
    code = (
        "import resource, signal, numpy as np\n"
        "from jaxpipe.data.indexed_writer import write_indexed\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "with write_indexed('data', vocab_size=9) as writer:\n"
        "    writer.add(np.zeros(90_000, int))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "DataError: data.bin cannot be written" in done.stderr
    assert "while writing: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    writing = write_indexed(str(tmp_path / "file" / "data"), vocab_size=9)
    with pytest.raises(DataError, match=r"rule output-files.*\n *.*/file: File exists"), writing:
        pass
