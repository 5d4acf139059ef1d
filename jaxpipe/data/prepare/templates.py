"""Chat templates of a tokenizer, and the process in which each is rendered.

Goes in: the files beside a tokenizer.json. Comes out: `ChatTemplate`s, which turn messages into text. Left to others:
what a template sees and how it is bounded (`sandbox`), and which messages are learned (`chat`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxpipe.data.prepare import sandbox
from jaxpipe.errors import ConfigError, explain
from jaxpipe.files import local_path

DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates, where a tokenizer has several

Span = tuple[int, int]


class RefusedError(Exception):
    """Why a template cannot be rendered; `str` of it is one line."""


class Sandbox:
    """The process that renders one template; it ends with this object."""

    def __init__(self):
        """Starts the process."""
        # The process finds Jinja where this one does, and nothing in the folder of the script.
        known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", sandbox.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=known,
        )
        self._end = weakref.finalize(self, _end, self._process)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the process answers, see `sandbox`.

        Raises:
            RefusedError: the template is wrong, refuses the messages, or takes too long or too much memory.
        """
        pipe, answers = self._process.stdin, self._process.stdout
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
    """A tokenizer's Jinja template of conversations, rendered in a process of its own.

    Attributes:
        source: text of the template.
        special: names of the special tokens that it may use, as "bos_token", with their texts.
        path: the file that it comes from, for messages.
    """

    source: str
    special: Mapping[str, str]
    path: str

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
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, answers: Sequence[int] = ()
    ) -> tuple[str, list[Span | None]]:
        """Returns the text of `messages`, and where in it each of `answers` begins and ends.

        Args:
            messages: with "role" and "content" each.
            variables: what else the template reads: "tools", "documents", those of the line.
            answers: indices of messages; what the template writes for each is looked for.

        Returns:
            The text with the marks of `sandbox`, and (first, end) of each answer in characters, None if it cannot be
            told.

        Raises:
            RefusedError: the template refuses the messages, is wrong, or takes too long or too much memory.
        """
        variables = {"tools": None, "documents": None, **self.special, **variables}
        found = self._compiled[0].ask({"messages": messages, "variables": variables, "answers": answers})
        return found["text"], [span and (span[0], span[1]) for span in found["spans"]]

    @cached_property
    def _compiled(self) -> tuple[Sandbox, dict[str, Any]]:
        process = Sandbox()
        try:
            return process, process.ask({"source": self.source, "seconds": sandbox.SECONDS})
        except RefusedError as error:
            raise ConfigError(
                explain(
                    f"{self.path} has a chat template that cannot be read",
                    rule="chat-template: the template is written in Jinja",
                    picture=str(error),
                    repair="take the file from where the tokenizer comes from",
                )
            ) from error


def read_templates(tokenizer: str) -> dict[str, ChatTemplate]:
    """Returns the templates beside a tokenizer.json, by name: of a single one, "default".

    That is chat_template.jinja with additional_chat_templates/NAME.jinja, or "chat_template" of tokenizer_config.json.
    They see the special tokens of tokenizer_config.json, and those of special_tokens_map.json that this lacks.

    Args:
        tokenizer: the path of a tokenizer.json, or of its folder.

    Raises:
        ConfigError: a file is damaged, or the default template is no Jinja.
    """
    path = local_path(tokenizer)
    folder = path if path.is_dir() else path.parent
    config_path, map_path = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    config = _read_json(config_path) if config_path.is_file() else {}
    of_map = _read_json(map_path) if map_path.is_file() else {}
    special = {
        name: _text_of(value)
        for source in (of_map, config)
        for name, value in source.items()
        if name.endswith("_token") and value
    }
    by_name = {name: (source, config_path) for name, source in _of_config(config.get("chat_template"), config_path)}
    own_path = folder / "chat_template.jinja"
    if own_path.is_file():
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files = {**{file.stem: file for file in others}, DEFAULT: own_path}
        by_name = {name: (_read(file), file) for name, file in files.items()}
    templates = {name: ChatTemplate(source, special, str(file)) for name, (source, file) in by_name.items()}
    if DEFAULT in templates:
        _ = templates[DEFAULT].variables  # a wrong one is told before any line is read
    return templates


def _of_config(found: Any, path: Path) -> list[tuple[str, str]]:
    """The name and text of each template in a tokenizer_config.json."""
    if not found:
        return []
    several = found if isinstance(found, list) else [{"name": DEFAULT, "template": found}]
    named: list[Any] = [(one.get("name"), one.get("template")) for one in several if isinstance(one, dict)]
    if len(named) < len(several) or not all(isinstance(text, str) for pair in named for text in pair):
        raise ConfigError(
            explain(
                f"{path} has a chat template that cannot be read",
                rule="chat-template: the template is a text, or several have names",
                picture=f"found {type(found).__name__}",
                repair="take the file from where the tokenizer comes from",
            )
        )
    return named


def _read_json(path: Path) -> dict[str, Any]:
    found = _read(path, json.loads)
    return found if isinstance(found, dict) else {}


def _read(path: Path, parse: Callable[[str], Any] = str) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            explain(
                f"{path} cannot be read",
                rule="tokenizer-config: the files beside a tokenizer.json are JSON or Jinja, in UTF-8",
                picture=str(error),
                repair="take the file from where the tokenizer comes from",
            )
        ) from error


def _text_of(token: Any) -> str:
    """The text of a special token, which tokenizer_config.json writes as a text or as an object."""
    return token if isinstance(token, str) else str(token.get("content", "")) if isinstance(token, dict) else ""
