"""The flags of `python -m jaxpipe.prepare`, and what it tells in the end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from absl import flags
from absl.flags import FlagValues

from jaxpipe.config.command_line import run
from jaxpipe.data.tokenizer import BYTE
from jaxpipe.prepare.encoding import Counted
from jaxpipe.prepare.input_files import FORMATS
from jaxpipe.prepare.prepare import TOKENIZER, Prepared, prepare


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run(
        execute,
        define_flags=define_flags,
        usage=__doc__,
        arguments=arguments,
        required={"input": "'texts/*.txt'", "tokenizer": "bpe:32000", "output": "data/text"},
    )


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --input, --tokenizer, --output and how files are read."""
    del arguments
    flags.DEFINE_multi_string(
        "input", [], "A file or a glob, in quotes, ** descends; may be given several times.", values
    )
    flags.DEFINE_string("tokenizer", None, "'byte', a tokenizer.json or its folder, or bpe:VOCAB to train one.", values)
    flags.DEFINE_string("output", None, "PREFIX of the files that are written: .bin, .idx, .tokenizer.json.", values)
    flags.DEFINE_enum(
        "format", "auto", FORMATS, "A document is a file, or the text of a JSON line; auto: by name.", values
    )
    flags.DEFINE_string("jsonl_key", "text", "Where the text stands in a line's JSON object.", values)
    flags.DEFINE_boolean("masked", False, "For masked models, as BERT: with [PAD], [CLS], [SEP], [MASK].", values)
    flags.DEFINE_integer(
        "num_workers", None, "Processes; one a core if left out, or fewer.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_boolean("overwrite", False, "Replaces files that are there.", values)


def execute(values: FlagValues) -> None:
    """One preparation."""
    prepared = prepare(
        values.input,
        tokenizer=values.tokenizer,
        output=values.output,
        form=values.format,
        jsonl_key=values.jsonl_key,
        is_masked=values.masked,
        num_workers=values.num_workers,
        overwrite=values.overwrite,
        say=lambda line: print(line, flush=True),
    )
    print(told(prepared))


def told(prepared: Prepared) -> str:
    """What to tell of it: counts, speed, and the flags to train with."""
    one = prepared
    written = [".bin", ".idx", *([TOKENIZER] if one.tokenizer != BYTE else [])]
    trained = f", after {one.train_s:.1f} s of training the vocabulary" if one.train_s else ""
    lines = [
        f"read       {one.num_files:,} files, {one.num_text_bytes / 1e6:,.1f} MB of text",
        *_counted("replaced", one.replaced, "places that are no UTF-8, by U+FFFD; the first"),
        *_counted("left out", one.empty, "empty documents; the first"),
        f"documents  {one.num_documents:,}",
        f"vocabulary {one.vocab_size:,} words",
        f"tokens     {one.num_tokens:,}, {one.dtype.name}; {one.num_text_bytes / one.num_tokens:.2f} bytes a token",
        f"speed      {one.num_text_bytes / 1e6 / one.encode_s:.1f} MB/s: {one.encode_s:.1f} s, processes:"
        f" {one.num_workers}{trained}",
        f"written    {', '.join(one.prefix + suffix for suffix in written)}",
        f"train with --config.data.files={shlex.quote(f'indexed:{one.prefix}')}"
        f" --config.data.tokenizer={shlex.quote(one.tokenizer)} --config.model.vocab_size={one.vocab_size}",
    ]
    return "\n".join(lines)


def _counted(what: str, counted: Counted, of: str) -> list[str]:
    return [f"{what:10} {counted.num:,} {of} in {counted.first}"] if counted.num else []
