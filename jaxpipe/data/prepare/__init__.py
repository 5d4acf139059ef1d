"""Prepares text: text files and JSON lines become tokens on the disk, in Megatron-LM's indexed format.

Goes in: text files or JSON lines, gzipped or not, and a tokenizer, or the size of a vocabulary to train. Comes out:
PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json, which training needs too. Memory is bounded by the longest JSON line
and 8 bytes a document. Left to others: the format (`data.indexed_writer`), the command (`jaxpipe.prepare`).
"""

from jaxpipe.data.prepare.preparation import Prepared, prepare

__all__ = ["Prepared", "prepare"]
