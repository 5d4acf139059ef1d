"""Renders chat templates, as a script in a process of its own: a template is a program, and may never end.

Goes in, a JSON object a line: first {"source": TEMPLATE, "seconds": SECONDS}, then conversations, as `Renderer.answer`
takes them. Comes out, a line for each: what was asked for, or {"error": [TYPE, MESSAGE, LINE]}. The kernel ends a
process that computes for longer; more than MEMORY_BYTES are a MemoryError. The script imports nothing of jaxpipe, so it
starts at once.

Source: what a template sees is what `render_jinja_template` of transformers 5.24 gives it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 10  # of computing, for one rendering
MEMORY_BYTES = 2**30  # of the process
MOST_CHARACTERS = 2**22  # of a text, of which the tokenizer makes much more
# No characters, by Unicode: they mark {% generation %} until the text is rendered.
BEGIN = "\ufdd0"
END = "\ufdd1"
_GENERATION = "generation"


class _Generation(Extension):
    """The tag {% generation %}: what stands in it is an answer."""

    tags = {_GENERATION}  # noqa: RUF012  # as Jinja asks for it

    def parse(self, parser: Any) -> nodes.Node:
        """Returns the contents of the tag between two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements((f"name:end{_GENERATION}",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
        return nodes.Scope([begin, *body, end], lineno=line)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment of a template: filters and functions, without its variables."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    made.filters["tojson"] = to_json
    made.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return made


class Renderer:
    """A compiled template."""

    def __init__(self, source: str, seconds: float):
        """Compiles `source`, raises what Jinja does; a rendering may compute for so many `seconds`."""
        # This timer counts what the process computes: a machine that is busy otherwise makes no template slow.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        self._environment = environment()
        self._seconds = seconds
        self._source = source
        self._template = self._environment.from_string(source)

    def outline(self) -> dict[str, Any]:
        """The variables that the template reads, all names and texts in it, and whether it marks its answers."""
        tree = self._environment.parse(self._source)
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        tokens = self._environment.lex(self._source)
        return {
            "variables": sorted(meta.find_undeclared_variables(tree)),
            "names": sorted(attributes | texts),
            "marks_answers": any(token[1:] == ("name", _GENERATION) for token in tokens),
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The text of a conversation, and where in it each of some messages begins and ends.

        Args:
            request: "messages"; "variables", the others; "answers", indices of messages; "is_asked", whether the
                beginning of the next answer follows.

        Returns:
            "text"; and "spans", for each answer its [first, end] in characters, null where they cannot be told.
        """
        messages = request["messages"]
        self._variables = request["variables"]
        text = self._render(messages, is_asked=request["is_asked"])
        return {"text": text, "spans": [self._span(messages, i, text) for i in request["answers"]]}

    def _span(self, messages: list[Any], i: int, text: str) -> tuple[int, int] | None:
        end = self._render(messages[: i + 1])
        # transformers renders no conversation without messages, and many templates look at the first one.
        before = self._render(messages[:i], is_asked=True) if i else self._before_first(messages[0], end)
        if before is None or not (text.startswith(before) and text.startswith(end)):
            return None
        return len(before), len(end)

    def _before_first(self, message: dict[str, Any], text: str) -> str | None:
        """The part of `text` before the answer that begins a conversation; None if that cannot be told.

        An answer begins after what asks for one, or with its content where nothing does.
        """
        asked = self._render([message], is_asked=True)
        content = str(message.get("content") or "").strip()
        question = asked.removeprefix(text) if asked.startswith(text) else ""
        begin = text.find(content or question)
        if content and question and begin >= 0:
            begin = text.rfind(question, 0, begin)
        return text[: begin + len(question)] if begin >= 0 and (content or question) else None

    def _render(self, messages: list[Any], *, is_asked: bool = False) -> str:
        # Set anew, so that each rendering has the whole time.
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        text = self._template.render(messages=messages, add_generation_prompt=is_asked, **self._variables)
        # The same error as for memory, since a tokenizer would need much more than the text.
        if len(text) > MOST_CHARACTERS:
            raise MemoryError
        return text


def _limit() -> None:
    """Bounds memory; lets the signal of the timer end this process, also inside of one long operation."""
    for kind, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        # A process may not raise its hard limit.
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(ValueError, OSError):  # macOS does not bound the address space
            resource.setrlimit(kind, (most, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def main() -> None:
    """Answers the lines of the standard input until it ends."""
    _limit()
    renderer = None
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            if renderer is None:
                renderer = Renderer(request["source"], request["seconds"])
                answer = json.dumps(renderer.outline())
            else:
                answer = json.dumps(renderer.answer(request))
        except Exception as error:  # whatever the code of the template does
            message = "" if isinstance(error, MemoryError) else str(error)[:1000]
            answer = json.dumps({"error": [type(error).__name__, message, getattr(error, "lineno", None)]})
        print(answer, flush=True)


if __name__ == "__main__":
    main()
