"""Conversations and answered prompts: the text of a document, and the parts of it that a model learns.

Goes in: a JSON object, {"prompt": ..., "answer": ...} or {"messages": [{"role": ..., "content": ...}, ...]}. Comes out:
its text with the spans of the answers. Left to others: reading lines and encoding text (`encoding`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxpipe.data.tokenizer import FILE
from jaxpipe.errors import ConfigError, DataError, explain
from jaxpipe.files import local_path

CHAT = "chat"  # value of --format
ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = ("answer", "completion", "response")  # keys of the text after "prompt"
_RULE = 'chat: a line is {"prompt": TEXT, "answer": TEXT} or {"messages": [{"role": ROLE, "content": TEXT}, ...]}'
_BEGIN, _END = "\ufdd0", "\ufdd1"  # no characters, by Unicode: they mark {% generation %} until the text is rendered

Span = tuple[int, int]


@dataclass(frozen=True)
class MarkedText:
    """A text, and what of it is learned.

    Attributes:
        text: all of it.
        spans: (first, end) of each learned part, in characters, ascending.
        has_special: whether names of special tokens in it are these tokens, as in a rendered template.
    """

    text: str
    spans: tuple[Span, ...]
    has_special: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's Jinja template of conversations, rendered in a sandbox: it reads the messages and nothing else.

    Attributes:
        source: text of the template.
        special: names of the special tokens that it may use, as "bos_token", with their texts.
        path: the file that it comes from, for messages.

    Source: the variables and functions that a template sees are those of `apply_chat_template` of transformers.
    """

    source: str
    special: Mapping[str, str]
    path: str

    @cached_property
    def marks_answers(self) -> bool:
        """Whether the template says itself what is an answer, by {% generation %}."""
        return _GENERATION in {token[2] for token in _environment().lex(self.source) if token[1] == "name"}

    def render(self, messages: Sequence[Mapping[str, Any]], *, is_asked: bool = False) -> str:
        """Returns the text of `messages`.

        Args:
            messages: with "role" and "content" each.
            is_asked: whether the beginning of the next answer follows.

        Raises:
            jinja2.TemplateError: the template refuses the messages, or is wrong.
        """
        return self._template.render(messages=messages, add_generation_prompt=is_asked, tools=None, **self.special)

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self.source)


_GENERATION = "generation"


class _Generation(Extension):
    """The tag {% generation %}: what stands in it is an answer."""

    tags = {_GENERATION}  # noqa: RUF012  # as Jinja asks for it

    def parse(self, parser: Any) -> nodes.Node:
        """Returns the contents of the tag between two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements((f"name:end{_GENERATION}",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END))
        return nodes.Scope([begin, *body, end], lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def read_template(tokenizer: str) -> ChatTemplate | None:
    """Returns the template beside a tokenizer.json: chat_template.jinja, or "chat_template" of tokenizer_config.json.

    It sees the special tokens of tokenizer_config.json, and those of special_tokens_map.json that this lacks.

    Args:
        tokenizer: the path of a tokenizer.json, or of its folder.

    Returns:
        None if there is none.

    Raises:
        ConfigError: a file is damaged, or the template is no Jinja.
    """
    path = local_path(tokenizer)
    folder = path if path.is_dir() else path.parent
    config_path, own_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = _read_json(config_path) if config_path.is_file() else {}
    found, where = config.get("chat_template"), config_path
    if isinstance(found, list):  # several by name
        named = [one for one in found if isinstance(one, dict)]
        found = next((one.get("template") for one in named if one.get("name") == "default"), None if named else found)
    if own_path.is_file():
        found, where = own_path.read_text(), own_path
    if not found:
        return None
    if not isinstance(found, str):
        raise ConfigError(
            explain(
                f"{where} has a chat template that cannot be read",
                rule="chat-template: the template is a text, or several have names",
                picture=f"found {type(found).__name__}",
                repair="take the file from where the tokenizer comes from",
            )
        )
    map_path = folder / "special_tokens_map.json"
    of_map = _read_json(map_path) if map_path.is_file() else {}
    special = {
        name: _text_of(value)
        for source in (of_map, config)
        for name, value in source.items()
        if name.endswith("_token") and value
    }
    template = ChatTemplate(found, special, str(where))
    try:
        template.render([])
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            explain(
                f"{where} has a chat template that cannot be read",
                rule="chat-template: the template is written in Jinja",
                picture=f"line {error.lineno}: {error.message}",
                repair="take the file from where the tokenizer comes from",
            )
        ) from error
    except Exception:
        pass  # it refuses a conversation without messages, in whatever way
    return template


def marked_text(
    document: Any, template: ChatTemplate | None, *, special: Sequence[str], place: str, tokenizer: str
) -> MarkedText:
    """Returns the text of a line, and its answers.

    Args:
        document: what the line's JSON is.
        template: renders messages; None if the tokenizer has none.
        special: names of the tokenizer's special tokens, which no message may contain.
        place: file and line, for messages.
        tokenizer: its name, for messages.

    Raises:
        DataError: the line has neither form, an unknown role, no answer, or messages that the template refuses.
    """
    if isinstance(document, dict) and "messages" in document:
        messages = _checked_messages(document["messages"], special, place)
        if template is None:
            raise DataError(
                explain(
                    f"{place} has messages, and the tokenizer no chat template",
                    rule="chat-template: messages become text by the template of the tokenizer",
                    picture=f"--tokenizer={tokenizer}: no chat_template.jinja and no chat_template in"
                    " tokenizer_config.json beside it",
                    repair=f"put one of them beside its {FILE}, or write lines of prompt and answer",
                )
            )
        return _rendered(messages, template, place)
    answers = [key for key in ANSWERS if isinstance(document, dict) and key in document]
    if not isinstance(document, dict) or "prompt" not in document or len(answers) != 1:
        keys = f"the keys {', '.join(document)}" if isinstance(document, dict) else type(document).__name__
        raise _wrong(place, "is no conversation", f"found {keys}; the answer is under one of {', '.join(ANSWERS)}")
    prompt, answer = document["prompt"], document[answers[0]]
    for key, text in (("prompt", prompt), (answers[0], answer)):
        if not isinstance(text, str):
            raise _wrong(place, f"has no text under {key!r}", f"found {type(text).__name__}")
    if not answer:
        raise _wrong(place, "has an empty answer", f"{answers[0]!r} is ''")
    return MarkedText(prompt + answer, ((len(prompt), len(prompt) + len(answer)),), has_special=False)


def _checked_messages(messages: Any, special: Sequence[str], place: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise _wrong(place, "has no messages", f"found {type(messages).__name__}")
    for number, message in enumerate(messages, 1):
        found = message if isinstance(message, dict) else {}
        role, content = found.get("role"), found.get("content")
        if role not in ROLES:
            raise _wrong(place, f"message {number} has an unknown role", f"found {role!r}; roles: {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise _wrong(place, f"message {number} has no text", f"'content' is of type {type(content).__name__}")
        if role == "assistant" and not content:
            raise _wrong(place, f"message {number} is an empty answer", "'content' is ''")
        inside = [name for name in (*special, _BEGIN, _END) if name in content]
        if inside:
            raise _wrong(
                place,
                f"message {number} has the name of a special token in its text",
                f"found {inside[0]!r}: it would end or begin a message",
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise _wrong(place, "has no answer", "no message has the role 'assistant', and answers alone are learned")
    return messages


def _rendered(messages: list[dict[str, Any]], template: ChatTemplate, place: str) -> MarkedText:
    try:
        marked = template.render(messages)
        if template.marks_answers:
            text, spans = _unmarked(marked)
        else:
            text = marked
            answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            before = [template.render(messages[:i], is_asked=True) for i in answers]
            after = [template.render(messages[: i + 1]) for i in answers]
            spans = tuple((len(one), len(other)) for one, other in zip(before, after, strict=True))
            if not all(text.startswith(prefix) for prefix in (*before, *after)):
                raise _wrong(
                    place,
                    "has answers that the template writes otherwise once other messages follow",
                    f"{template.path}: where an answer begins and ends cannot be told",
                    repair="mark the answers in the template by {% generation %} ... {% endgeneration %}, or give each"
                    " answer a line of its own, with the messages before it",
                )
    except DataError:
        raise
    except Exception as error:  # whatever the code of the template does
        why = f"{template.path}: {type(error).__name__}: {error}"
        raise _wrong(place, "is refused by the chat template", why) from error
    return MarkedText(text, spans, has_special=True)


def _unmarked(marked: str) -> tuple[str, tuple[Span, ...]]:
    """Returns a text without its marks, and the spans between them.

    Example:
        >>> _unmarked(f"ab{_BEGIN}cd{_END}e")
        ('abcde', ((2, 4),))
    """
    text, spans = "", []
    before, *parts = marked.split(_BEGIN)
    text = before
    for part in parts:
        answer, after = part.split(_END)
        spans.append((len(text), len(text) + len(answer)))
        text += answer + after
    return text, tuple(spans)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            explain(
                f"{path} cannot be read",
                rule="tokenizer-config: the file beside a tokenizer.json is JSON",
                picture=str(error),
                repair="take the file from where the tokenizer comes from",
            )
        ) from error
    return found if isinstance(found, dict) else {}


def _text_of(token: Any) -> str:
    """The text of a special token, which tokenizer_config.json writes as a text or as an object."""
    return token if isinstance(token, str) else str(token.get("content", "")) if isinstance(token, dict) else ""


def _wrong(place: str, what: str, picture: str, repair: str = "correct or remove the line") -> DataError:
    return DataError(explain(f"{place} {what}", rule=_RULE, picture=picture, repair=repair))
