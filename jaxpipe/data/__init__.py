"""Text files to microbatches of tokens, in an order that a seed decides, for causal and for masked language models."""

from jaxpipe.data.batches import Batches
from jaxpipe.data.corpus import Blend, Corpus, load_corpus
from jaxpipe.data.fingerprint import Fingerprint
from jaxpipe.data.masked import MaskedSequences
from jaxpipe.data.packing import CausalSequences, PackedSequences
from jaxpipe.data.protocols import Batch, Documents, MaskedVocabulary, Sequences, Tokenizer, Tokens
from jaxpipe.data.tokenizer import load_tokenizer

__all__ = [
    "Batch",
    "Batches",
    "Blend",
    "CausalSequences",
    "Corpus",
    "Documents",
    "Fingerprint",
    "MaskedSequences",
    "MaskedVocabulary",
    "PackedSequences",
    "Sequences",
    "Tokenizer",
    "Tokens",
    "load_corpus",
    "load_tokenizer",
]
