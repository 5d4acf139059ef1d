"""Damaged .bin and .idx: each a clear error before a token is read, and whole ones pass."""

import struct

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
    "truncated bin": (BIN[:-1], IDX, "data.bin is shorter than", "indexed-size", "needed 12 bytes"),
    "bin too long": (BIN + b"\0\0", IDX, "data.bin is longer than", "indexed-size", "found  14 bytes"),
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
