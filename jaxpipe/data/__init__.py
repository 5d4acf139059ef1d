"""Text files to microbatches of tokens, in an order that a seed decides, for causal and for masked language models."""

from jaxpipe.data.batches import Batches
from jaxpipe.data.blocks import Tokens
from jaxpipe.data.causal import CausalSequences
from jaxpipe.data.corpus import Corpus, Part, load_corpus
from jaxpipe.data.fingerprint import Fingerprint
from jaxpipe.data.masked import MaskedSequences
from jaxpipe.data.masked_vocabulary import MaskedVocabulary
from jaxpipe.data.sequences import Batch, Sequences
from jaxpipe.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Batches",
    "CausalSequences",
    "Corpus",
    "Fingerprint",
    "MaskedSequences",
    "MaskedVocabulary",
    "Part",
    "Sequences",
    "Tokenizer",
    "Tokens",
    "load_corpus",
    "load_tokenizer",
]
