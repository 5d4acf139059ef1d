"""Prepares text for training: its tokens on the disk, in Megatron-LM's indexed format.

    python -m jaxpipe.prepare --input='texts/*.txt' --tokenizer=bpe:32000 --output=data/text
    python -m jaxpipe.prepare --input=chats.jsonl --format=chat --seq_len=2048 --tokenizer=models/q --output=data/chat

--input may be given several times. Writes PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json, where PREFIX is --output;
of conversations also PREFIX.loss.bin and PREFIX.loss.idx, which say what is learned: the answers.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from absl import flags
from absl.flags import FlagValues

from jaxpipe.command_line import main_of
from jaxpipe.config.command_line import run
from jaxpipe.data.byte_tokenizer import BYTE
from jaxpipe.data.huggingface_tokenizer import format_characters
from jaxpipe.data.indexed import LOSS, TOKENIZER
from jaxpipe.data.prepare.encoding import Tally
from jaxpipe.data.prepare.preparation import Prepared, prepare
from jaxpipe.data.prepare.reading import FORMATS
from jaxpipe.data.special_tokens import FILE, TOKENIZER_CONFIG

_MOST_WORKERS = 1024  # the tokenizer's library starts all of them, however few texts there are


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --input, --tokenizer, --output and how files are read."""
    del arguments
    flags.DEFINE_multi_string(
        "input", [], "A file or a glob, in quotes, ** descends; may be given several times.", values
    )
    flags.DEFINE_string("tokenizer", None, "'byte', a tokenizer.json or its folder, or bpe:VOCAB to train one.", values)
    flags.DEFINE_string("output", None, "PREFIX of the files that are written: .bin, .idx, .tokenizer.json.", values)
    flags.DEFINE_enum(
        "format",
        "auto",
        FORMATS,
        "A document is a file, the text of a JSON line, or a chat with answers to learn; auto: by name.",
        values,
    )
    flags.DEFINE_integer(
        "seq_len",
        None,
        "For --format=chat: the most tokens of a conversation, as data.seq_len; a longer one is an error.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "markup", False, "For --format=chat: names of special tokens in texts, as <|im_end|>, are the tokens.", values
    )
    flags.DEFINE_multi_string(
        "ignore_key", [], "For --format=chat: a key of lines or messages to leave out; several times.", values
    )
    flags.DEFINE_string("jsonl_key", "text", "The key of the text in a line's JSON object.", values)
    flags.DEFINE_boolean("masked", False, "For masked models, as BERT: with [PAD], [CLS], [SEP], [MASK].", values)
    flags.DEFINE_integer(
        "num_workers",
        None,
        "Threads that encode; one per core by default.",
        lower_bound=1,
        upper_bound=_MOST_WORKERS,
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "drop_characters", False, "Leaves out characters that the vocabulary lacks; else they are an error.", values
    )
    flags.DEFINE_boolean("overwrite", False, "Replaces existing files.", values)


def execute(values: FlagValues) -> None:
    """Runs one preparation."""
    if values.num_workers is not None:
        # The thread pool of the tokenizers library reads it when it starts.
        os.environ["RAYON_NUM_THREADS"] = str(values.num_workers)
    prepared = prepare(
        values.input,
        tokenizer=values.tokenizer,
        output=values.output,
        file_format=values.format,
        jsonl_key=values.jsonl_key,
        seq_len=values.seq_len,
        reads_markup=values.markup,
        ignored_keys=values.ignore_key,
        is_masked=values.masked,
        drop_characters=values.drop_characters,
        overwrite=values.overwrite,
        log=lambda line: print(line, flush=True),
    )
    print(format_prepared(prepared))


def format_prepared(prepared: Prepared) -> str:
    """Returns the report of a preparation: counts, speed, and the flags to train with."""
    notes = prepared.notes
    has_loss = prepared.num_learned is not None
    learned = prepared.num_learned or 0
    loss = [f"{LOSS}.bin", f"{LOSS}.idx"] if has_loss else []
    about = [f".{TOKENIZER_CONFIG}"] if prepared.has_about else []
    written = [".bin", ".idx", *loss, *([TOKENIZER] if prepared.tokenizer != BYTE else []), *about]
    trained = f", after {prepared.train_s:.1f} s of training the vocabulary" if prepared.train_s else ""
    size = f"data.seq_len={prepared.seq_len}" if prepared.seq_len else f"model.vocab_size={prepared.vocab_size}"
    lines = [
        f"read       {prepared.num_files:,} files, {notes.num_text_bytes / 1e6:,.1f} MB of text",
        *_format_tally("replaced", notes.replaced, "places of invalid UTF-8, by U+FFFD; the first in"),
        *_format_tally("left out", notes.empty, "empty documents; the first in"),
        *_format_tally("markup", notes.markup, "lines with the name of a special token, read as text; the first is"),
        *(["           --markup reads such names as these tokens"] if notes.markup.num else []),
        # The most frequent characters alone: a text may lack thousands.
        *(
            [f"dropped    {notes.dropped.total():,} characters: {format_characters(notes.dropped)}"]
            if notes.dropped
            else []
        ),
        *_format_tally("unknown", notes.unknown, "tokens stand for what the vocabulary lacks; the first in"),
        f"documents  {prepared.num_documents:,}",
        f"vocabulary {prepared.vocab_size:,} tokens",
        *(
            [f"separator  {prepared.separator}; a generated text ends at {' or '.join(prepared.ends)}"]
            if prepared.separator
            else []
        ),
        *(
            [f"missing    {', '.join(prepared.missing)}: its files name them, {FILE} has no such tokens"]
            if prepared.missing
            else []
        ),
        f"tokens     {prepared.num_tokens:,}, {prepared.dtype.name};"
        f" {notes.num_text_bytes / prepared.num_tokens:.2f} bytes a token",
        *([f"learned    {learned:,} tokens, {learned / prepared.num_tokens:.1%}: the answers"] if has_loss else []),
        f"speed      {notes.num_text_bytes / 1e6 / prepared.encode_s:.1f} MB/s: {prepared.encode_s:.1f} s{trained}",
        f"written    {', '.join(prepared.prefix + suffix for suffix in written)}",
        f"train with --config.data.files={shlex.quote(f'indexed:{prepared.prefix}')}"
        f" --config.data.tokenizer={shlex.quote(prepared.tokenizer)} --config.{size}"
        # Only for answers that are learned: other text runs on over the ends of documents.
        + " --config.data.packing=documents"
        * has_loss,
    ]
    return "\n".join(lines)


def _format_tally(what: str, tally: Tally, of: str) -> list[str]:
    return [f"{what:10} {tally.num:,} {of} {tally.first}"] if tally.num else []


main = main_of(
    run,
    execute,
    define_flags=define_flags,
    usage=__doc__,
    required={"input": "'texts/*.txt'", "tokenizer": "bpe:32000", "output": "data/text"},
)

if __name__ == "__main__":
    sys.exit(main())
