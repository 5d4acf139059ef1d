"""Text files to microbatches of byte-level tokens, in an order that a seed decides."""

from jaxpipe.data.batches import Batches
from jaxpipe.data.corpus import VOCAB_SIZE, Corpus, load_corpus

__all__ = ["VOCAB_SIZE", "Batches", "Corpus", "load_corpus"]
