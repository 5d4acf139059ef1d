"""Text to tokens on the disk: `python -m jaxpipe.prepare --input=GLOB --tokenizer=bpe:32000 --output=PREFIX`.

Goes in: text files or JSON lines, gzipped or not, and a tokenizer, or how large a vocabulary to train. Comes out:
PREFIX.bin and PREFIX.idx, Megatron-LM's indexed format, and PREFIX.tokenizer.json, which training needs besides.
Memory is bounded by the longest JSON line and 8 bytes a document. Left to others: the format (`data.indexed_writer`).
"""

from jaxpipe.prepare.prepare import Prepared, prepare

__all__ = ["Prepared", "prepare"]
