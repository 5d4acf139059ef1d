"""Chat templates of a tokenizer, and the process in which each is rendered.

Goes in: the files beside a tokenizer.json. Comes out: `ChatTemplate`s, which turn messages into text. Left to others:
what a template sees and how it is bounded (`sandbox`), and which messages are learned (`chat`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxpipe.data.byte_tokenizer import BYTE
from jaxpipe.data.prepare import sandbox
from jaxpipe.data.prepare.sandbox import BEGIN, END
from jaxpipe.data.special_tokens import read_special_tokens
from jaxpipe.data.tokenizer_file import file_of
from jaxpipe.errors import ConfigError

Span = tuple[int, int]


class RefusedError(Exception):
    """Why a template cannot be rendered; `str` of it is one line."""


class Sandbox:
    """The process that renders one template; it ends with this object."""

    def __init__(self):
        # The process finds Jinja where this one does, and nothing in the folder of the script.
        known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", sandbox.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=known,
        )
        # `finalize` and not `__del__`: the process ends also when this one ends first.
        self._end = weakref.finalize(self, _end, self._process)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the process answers, see `sandbox`; RefusedError if the template is wrong, slow or refuses."""
        pipe = self._process.stdin
        answers = self._process.stdout
        assert pipe is not None
        assert answers is not None
        try:
            asked = json.dumps(request).encode()
        except RecursionError as error:
            raise RefusedError("the line is nested too deep") from error
        try:
            pipe.write(asked + b"\n")
            pipe.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            # The signal by which the kernel ended it says why.
            status = self._process.wait()
            raise RefusedError(
                f"it computes for more than {sandbox.SECONDS} s"
                if status == -signal.SIGPROF
                else f"its process ended with status {status}"
            )
        answer = json.loads(line)
        if "error" in answer:
            kind, message, number = answer["error"]
            if kind == MemoryError.__name__:
                raise RefusedError(
                    f"it takes more than {sandbox.MEMORY_BYTES >> 20} MiB of memory, or makes a text of more than"
                    f" {sandbox.MOST_CHARACTERS:,} characters"
                )
            raise RefusedError(f"{kind}: {message}" if number is None else f"line {number}: {message}")
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's Jinja template of conversations, rendered in a process of its own."""

    source: str
    special: Mapping[str, str]  # names of the special tokens that it may use, as "bos_token", with their texts
    path: str  # the file that it comes from, for messages

    @property
    def marks_answers(self) -> bool:
        """Whether the template says itself what is an answer, by {% generation %}."""
        return self._compiled[1]["marks_answers"]

    @property
    def variables(self) -> Sequence[str]:
        """The variables that it reads, "messages" among them."""
        return self._compiled[1]["variables"]

    @property
    def names(self) -> Sequence[str]:
        """All names of attributes and all texts in its code: a key of a message that it reads is among them."""
        return self._compiled[1]["names"]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        answers: Sequence[int] = (),
        is_asked: bool = False,
    ) -> tuple[str, list[Span | None]]:
        """Returns the text of `messages`, and where in it answers begin and end.

        Args:
            variables: what else the template reads: "tools", "documents", those of the line.
            answers: indices of messages; what the template writes for each is looked for, unless it `marks_answers`.
            is_asked: whether the beginning of the next answer follows.

        Returns:
            The text, and (first, end) in characters of each answer that the template marks, or of each of `answers`,
            None if it cannot be told.

        Raises:
            RefusedError: the template refuses the messages, is wrong, or takes too long or too much memory.
            ConfigError: the template is no Jinja.
        """
        variables = {"tools": None, "documents": None, **self.special, **variables}
        asked = {"messages": messages, "variables": variables, "is_asked": is_asked}
        answer = self._compiled[0].ask(asked | {"answers": () if self.marks_answers else answers})
        if self.marks_answers:
            text, spans = _unmarked(answer["text"])
            return text, [*spans]
        return answer["text"], [span and (span[0], span[1]) for span in answer["spans"]]

    @cached_property
    def _compiled(self) -> tuple[Sandbox, dict[str, Any]]:
        process = Sandbox()
        try:
            return process, process.ask({"source": self.source, "seconds": sandbox.SECONDS})
        except RefusedError as error:
            raise ConfigError(
                f"{self.path} has a chat template that cannot be read",
                rule="chat-template: the template is written in Jinja",
                picture=str(error),
                repair="take the file from where the tokenizer comes from",
            ) from error


def read_templates(tokenizer: str) -> dict[str, ChatTemplate]:
    """Returns the templates beside a tokenizer.json, by name: of a single one, "default"; none for "byte".

    Templates see the special tokens that the files beside it name.
    """
    if tokenizer == BYTE:
        return {}
    files = read_special_tokens(file_of(tokenizer))
    return {
        name: ChatTemplate(source, files.named, str(files.template_files[name]))
        for name, source in files.templates.items()
    }


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """Returns a text without its marks, and the spans between them.

    Example:
        >>> _unmarked(f"ab{BEGIN}cd{END}e")
        ('abcde', [(2, 4)])
    """
    text = ""
    spans = []
    begins = []
    for piece in re.split(f"([{BEGIN}{END}])", marked):
        if piece == BEGIN:
            begins.append(len(text))
        elif piece != END:
            text += piece
        elif begins:
            spans.append((begins.pop(), len(text)))
    return text, spans
