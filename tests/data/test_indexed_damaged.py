"""Damaged .bin and .idx: each a clear error before a token is read, and whole ones pass."""

import errno
import os
import struct

import numpy as np
import pytest
from test_indexed import BIN, IDX, write

from jaxpipe.data.indexed import IndexedTokens
from jaxpipe.errors import DataError

COUNTS, LENGTHS, POINTERS, DOCUMENTS = 18, 34, 34 + 3 * 4, 34 + 3 * 4 + 3 * 8


def changed(place: int, form: str, *values: int) -> bytes:
    """The whole index with `values` at byte `place`."""
    packed = struct.pack(form, *values)
    return IDX[:place] + packed + IDX[place + len(packed) :]


NO_SEQUENCES = changed(COUNTS, "<QQ", 0, 1)[:34] + struct.pack("<q", 0)
EMPTY_SEQUENCES = changed(LENGTHS, "<3i3q", 0, 0, 0, 0, 0, 0)

DAMAGED = {
    "truncated bin": (BIN[:-1], IDX, "data.bin ends too early", "indexed-size", "needed 12 bytes"),
    "bin too long": (BIN + b"\0\0", IDX, "data.bin is too long", "indexed-size", "found  14 bytes"),
    "empty bin": (b"", IDX, "data.bin is empty", "indexed-tokens", "found 0 bytes"),
    "empty idx": (BIN, b"", "data.idx is empty", "indexed-tokens", "found 0 bytes"),
    "wrong magic": (BIN, b"NOTANIDX\0" + IDX[9:], "not an index of tokens", "indexed-magic", r"found b'NOTANIDX\x00'"),
    "text for an idx": (BIN, b"{}", "not an index of tokens", "indexed-magic", "found b'{}'"),
    "version": (BIN, changed(9, "<Q", 2), "version=2", "indexed-version", "found 2"),
    "unknown dtype": (BIN, changed(17, "<B", 9), "an unknown dtype, code 9", "indexed-dtype", "codes: 1 uint8, 2 int8"),
    "float dtype": (BIN, changed(17, "<B", 7), "tokens of float32, code 7", "indexed-dtype", "5 int64, 8 uint16"),
    "other dtype": (BIN, changed(17, "<B", 4), "sequence 1 is not where", "indexed-contiguous", "needed byte 12,"),
    "truncated header": (BIN, IDX[:20], "ends too early", "indexed-size", "needed 34 bytes"),
    "truncated idx": (BIN, IDX[:-1], "ends too early", "indexed-size", "found  93 bytes"),
    "idx too long": (BIN, IDX + b"\0", "is too long", "indexed-size", "needed 94 bytes"),
    "modes": (BIN, IDX + b"\0\0\0", "multimodal", "indexed-text", "found 3 bytes"),
    "huge count": (BIN, changed(COUNTS, "<Q", 2**60), "ends too early", "indexed-size", "found  94 bytes"),
    "pointer": (
        BIN,
        changed(POINTERS, "<3q", 0, 6, 8),
        "sequence 2 is not where",
        "indexed-contiguous",
        "found  byte 8",
    ),
    "first pointer": (BIN, changed(POINTERS, "<q", 2), "sequence 0 is not", "indexed-contiguous", "found  byte 2"),
    "negative length": (BIN, changed(LENGTHS, "<i", -3), "sequence 0 is not", "indexed-contiguous", "length -3"),
    "no sequences": (BIN, NO_SEQUENCES, "has no sequences", "indexed-tokens", "num_sequences=0"),
    "no tokens": (BIN, EMPTY_SEQUENCES, "has no tokens", "indexed-tokens", "3 sequences, all empty"),
    "last document": (BIN, changed(DOCUMENTS, "<3q", 0, 1, 2), "do not cover", "indexed-documents", "found 0, 1, 2"),
    "first document": (BIN, changed(DOCUMENTS, "<3q", 1, 1, 3), "do not cover", "indexed-documents", "found 1, 1, 3,"),
    "documents go down": (
        BIN,
        changed(DOCUMENTS, "<3q", 0, 4, 3),
        "do not cover",
        "indexed-documents",
        "found 0, 4, 3",
    ),
    "no documents": (BIN, changed(COUNTS + 8, "<Q", 0)[:-24], "do not cover", "indexed-documents", "last []"),
}


@pytest.mark.parametrize(("tokens", "index", "what", "rule", "picture"), DAMAGED.values(), ids=DAMAGED)
def test_each_damage_has_its_error(tmp_path, tokens, index, what, rule, picture):
    prefix = write(tmp_path, tokens, index)
    with pytest.raises(DataError) as error:
        IndexedTokens.open(prefix)
    first, second, *rest = str(error.value).splitlines()
    assert what in first
    assert str(tmp_path) in first
    assert second.startswith(f"  rule {rule}: ")
    assert picture in "\n".join(rest)
    assert rest[-1].startswith("  repair: ")


@pytest.mark.parametrize("missing", ["data.bin", "data.idx"])
def test_a_missing_file_is_named(tmp_path, missing):
    prefix = write(tmp_path)
    IndexedTokens.open(prefix)
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=rf"no file .*{missing}\n  rule indexed-files(.|\n)*PREFIX={prefix}; current"):
        IndexedTokens.open(prefix)


def test_the_name_of_a_file_in_place_of_the_prefix_is_mended(tmp_path):
    prefix = write(tmp_path)
    with pytest.raises(DataError, match=rf"repair: write indexed:{prefix}, or"):
        IndexedTokens.open(f"{prefix}.bin")


def test_damage_in_a_later_block_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpipe.data.indexed.BLOCK_SEQUENCES", 1)
    IndexedTokens.open(write(tmp_path))
    for place in (POINTERS + 16, DOCUMENTS + 8):
        with pytest.raises(DataError, match=r"rule indexed-(contiguous|documents)"):
            IndexedTokens.open(write(tmp_path, index=changed(place, "<q", 5)))


@pytest.mark.parametrize(("name", "field"), [("data.bin", "tokens"), ("data.idx", "documents")])
def test_a_file_that_is_cut_short_after_it_was_opened_is_named(tmp_path, name, field):
    found = IndexedTokens.open(write(tmp_path))
    size = (tmp_path / name).stat().st_size
    os.truncate(tmp_path / name, size - 1)
    with pytest.raises(DataError) as error:
        getattr(found, field)[:]
    first, second, *rest = str(error.value).splitlines()
    assert first == f"{tmp_path / name} has become shorter since the run began"
    assert second.startswith("  rule data-stays: ")
    assert [line.split() for line in rest[:2]] == [["needed", str(size), "bytes"], ["found", str(size - 1), "bytes"]]
    assert rest[2].startswith("  repair: bring the file back")


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    found = IndexedTokens.open(write(tmp_path))
    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(DataError, match=r"data\.bin cannot be read: Input/output error\n  rule data-stays"):
        found.tokens[np.array([0])]


def test_a_file_that_is_replaced_or_deleted_is_read_as_it_was(tmp_path):
    found = IndexedTokens.open(write(tmp_path))
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "other").rename(tmp_path / "data.bin")
    (tmp_path / "data.idx").unlink()
    assert (found.tokens[:].tolist(), found.ends().tolist()) == ([7, 8, 9, 10, 11, 65000], [3, 6])


@pytest.mark.parametrize("positions", [[[1, 2, 3], [2, 3, 4]], [[5, 0, 0]], [[]], [[3], [1]]])
def test_positions_of_any_kind_are_those_of_an_array(tmp_path, monkeypatch, positions):
    whole, read = np.array([7, 8, 9, 10, 11, 65000]), os.preadv
    found, positions = IndexedTokens.open(write(tmp_path)).tokens, np.array(positions, np.int64)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:3]], offset))  # in pieces
    np.testing.assert_array_equal(found[positions], whole[positions])
    for beyond in (positions - 6, positions + 6):
        if positions.size:
            with pytest.raises(IndexError):
                found[beyond]
