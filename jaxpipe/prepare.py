"""Prepares text for training: its tokens on the disk, in Megatron-LM's indexed format.

    python -m jaxpipe.prepare --input='texts/*.txt' --tokenizer=bpe:32000 --output=data/text

--input may be given several times. Writes PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json, where PREFIX is --output.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from absl import flags

from jaxpipe.config.command_line import require, run
from jaxpipe.data.prepare.encoding import Tally
from jaxpipe.data.prepare.preparation import TOKENIZER, Prepared, prepare
from jaxpipe.data.prepare.reading import FORMATS
from jaxpipe.data.tokenizer import BYTE

FLAGS = flags.FLAGS


def define_flags(arguments: list[str]) -> None:
    """Defines --input, --tokenizer, --output and how files are read."""
    require("input", arguments, example="'texts/*.txt'")
    require("tokenizer", arguments, example="bpe:32000")
    require("output", arguments, example="data/text")
    flags.DEFINE_multi_string("input", [], "A file or a glob, in quotes, ** descends; may be given several times.")
    flags.DEFINE_string("tokenizer", None, "'byte', a tokenizer.json or its folder, or bpe:VOCAB to train one.")
    flags.DEFINE_string("output", None, "PREFIX of the files that are written: .bin, .idx, .tokenizer.json.")
    flags.DEFINE_enum("format", "auto", FORMATS, "A document is a file, or the text of a JSON line; auto: by name.")
    flags.DEFINE_string("jsonl_key", "text", "The key of the text in a line's JSON object.")
    flags.DEFINE_boolean("masked", False, "For masked models, as BERT: with [PAD], [CLS], [SEP], [MASK].")
    flags.DEFINE_integer("num_workers", None, "Threads that encode; one per core by default.", lower_bound=1)
    flags.DEFINE_boolean("overwrite", False, "Replaces existing files.")


def main(_: Sequence[str]) -> None:
    """Runs one preparation."""
    if FLAGS.num_workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(
            FLAGS.num_workers
        )  # the thread pool of tokenizers reads it when it starts
    prepared = prepare(
        FLAGS.input,
        tokenizer=FLAGS.tokenizer,
        output=FLAGS.output,
        file_format=FLAGS.format,
        jsonl_key=FLAGS.jsonl_key,
        is_masked=FLAGS.masked,
        overwrite=FLAGS.overwrite,
        log=lambda line: print(line, flush=True),
    )
    print(format_prepared(prepared))


def format_prepared(prepared: Prepared) -> str:
    """Returns the report of a preparation: counts, speed, and the flags to train with."""
    one = prepared
    written = [".bin", ".idx", *([TOKENIZER] if one.tokenizer != BYTE else [])]
    trained = f", after {one.train_s:.1f} s of training the vocabulary" if one.train_s else ""
    lines = [
        f"read       {one.num_files:,} files, {one.num_text_bytes / 1e6:,.1f} MB of text",
        *_format_tally("replaced", one.replaced, "places of invalid UTF-8, by U+FFFD; the first"),
        *_format_tally("left out", one.empty, "empty documents; the first"),
        f"documents  {one.num_documents:,}",
        f"vocabulary {one.vocab_size:,} tokens",
        f"tokens     {one.num_tokens:,}, {one.dtype.name}; {one.num_text_bytes / one.num_tokens:.2f} bytes a token",
        f"speed      {one.num_text_bytes / 1e6 / one.encode_s:.1f} MB/s: {one.encode_s:.1f} s{trained}",
        f"written    {', '.join(one.prefix + suffix for suffix in written)}",
        f"train with --config.data.files={shlex.quote(f'indexed:{one.prefix}')}"
        f" --config.data.tokenizer={shlex.quote(one.tokenizer)} --config.model.vocab_size={one.vocab_size}",
    ]
    return "\n".join(lines)


def _format_tally(what: str, tally: Tally, of: str) -> list[str]:
    return [f"{what:10} {tally.num:,} {of} in {tally.first}"] if tally.num else []


if __name__ == "__main__":
    run(main, define_flags=define_flags)
