r"""Megatron-LM's indexed format: tokens in PREFIX.bin, and the ends of sequences and documents in PREFIX.idx.

PREFIX.bin contains only the tokens of all sequences, concatenated. PREFIX.idx is little-endian:

    bytes  type    what
        9          b"MMIDIDX\x00\x00"
        8  uint64  version, 1
        1  uint8   code of the tokens' dtype, a key of DTYPES
        8  uint64  S, the number of sequences
        8  uint64  E, the number of document ends that follow: documents + 1
      4 S  int32   tokens of each sequence
      8 S  int64   first byte of each sequence in PREFIX.bin
      8 E  int64   ends of documents, counted in sequences: 0, the end of the first document, ..., S

PREFIX.loss.bin and PREFIX.loss.idx, if there are any, have the same form: for each token 1 if a model learns to predict
it, 0 if it only reads it. They are jaxpipe's own; Megatron-LM reads the other two without them.

Multimodal data have S bytes more, a mode for each sequence; jaxpipe does not read these.

Source: class _IndexWriter and class DType in megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from jaxpipe.paths import local_path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TOKENIZER, LOSS = ".tokenizer.json", ".loss"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code, sequences, document ends
LENGTH, POINTER, END = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<i8")

CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
DTYPES = {code: np.dtype(name).newbyteorder("<") for code, name in CODES.items()}

VOCAB_SIZE_OF_INT32 = 65500  # from this size on Megatron-LM uses int32 instead of uint16


def dtype_code(vocab_size: int) -> int:
    """Returns the code of the dtype that Megatron-LM uses for the tokens of a vocabulary (DType.optimal_dtype).

    Example:
        >>> CODES[dtype_code(50257)], CODES[dtype_code(128256)]
        ('uint16', 'int32')
    """
    name = "uint16" if vocab_size < VOCAB_SIZE_OF_INT32 else "int32"
    return next(code for code, found in CODES.items() if found == name)


def tokens_path(prefix: str) -> Path:
    """Returns the path PREFIX.bin, with `~` expanded."""
    return local_path(f"{prefix}.bin")


def tokenizer_path(prefix: str) -> Path:
    """Returns the path PREFIX.tokenizer.json, with `~` expanded; data of bytes or of Megatron-LM has no such file."""
    return local_path(f"{prefix}{TOKENIZER}")


def index_path(prefix: str) -> Path:
    """Returns the path PREFIX.idx, with `~` expanded."""
    return local_path(f"{prefix}.idx")
