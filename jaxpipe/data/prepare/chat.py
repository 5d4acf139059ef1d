"""Conversations and answered prompts: the text of a document, and the parts of it that a model learns.

Goes in: a JSON object, {"prompt": ..., "answer": ...} or {"messages": [{"role": ..., "content": ...}, ...]}. Comes out:
its text with the spans of the answers. Left to others: reading lines and encoding text (`encoding`), and rendering
templates (`templates`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpipe.data.prepare.sandbox import BEGIN, END
from jaxpipe.data.prepare.templates import ChatTemplate, RefusedError, Span
from jaxpipe.data.special_tokens import DEFAULT, FILE
from jaxpipe.errors import DataError

CHAT = "chat"  # value of --format
TOOL_USE = "tool_use"  # the template for lines with tools, where a tokenizer has several
ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = ("answer", "completion", "response")  # keys of the text after "prompt"
_RULE = 'chat: a line is {"prompt": TEXT, "answer": TEXT} or {"messages": [{"role": ROLE, "content": TEXT}, ...]}'

# The keys of a line of messages, and of a message. A template may read more of a message.
_VARIABLES = "chat_template_kwargs"
_LISTS = ("tools", "documents")  # of objects; variables of the template
_OF_MESSAGES = ("messages", *_LISTS, _VARIABLES)
_LEARNED = ("weight", "train", "loss_mask")  # 1 or true: this answer is learned
_LABELS = ("name", "tool_call_id")  # templates may leave them out
_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; transformers takes the first
_OF_MESSAGE = ("role", "content", *_LABELS, *_LEARNED)
_NOT_FOLLOWED = {
    "system": "a system prompt is the first of the messages, with the role 'system'",
    "conversations": "turns are under 'messages', each with 'role' and 'content'",
    "functions": "tools are under 'tools', as transformers takes them",
    "function_call": "calls are under 'tool_calls', as transformers takes them",
}
# Arguments of transformers' `apply_chat_template` itself.
_RESERVED = ("messages", *_LISTS, "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
_MARK = "\ufdd2"  # no character, by Unicode: put into answers that are not learned


@dataclass(frozen=True)
class MarkedText:
    """A text, and what of it is learned."""

    text: str  # all of it
    spans: tuple[Span, ...]  # (first, end) of each learned part, in characters, ascending
    is_rendered: bool  # whether a template has written it, so that names of special tokens in it are these tokens
    markup: str = ""  # the name of a special token that is text in a prompt or its answer; empty if there is none


@dataclass(frozen=True)
class ChatOptions:
    """How lines of conversations become documents."""

    templates: Mapping[str, ChatTemplate]  # of the tokenizer, by name
    tokenizer: str  # its name, for messages
    seq_len: int  # the most tokens that a conversation may predict, as `data.seq_len`
    special: Sequence[str]  # names of the tokenizer's special tokens
    ends: Sequence[int]  # the tokens at which a generated text ends
    reads_markup: bool = False  # whether names of special tokens in prompts, answers and messages are these tokens
    ignored_keys: Sequence[str] = ()  # keys of lines and messages that are left out


def marked_text(line: Any, options: ChatOptions, *, place: str) -> MarkedText:
    """Returns the text of a line, and its answers.

    Raises:
        DataError: the line has neither form, an unknown key or role, no answer, or messages that the template refuses.
    """
    if not isinstance(line, dict):
        raise _wrong(place, "is no conversation", f"found {type(line).__name__}")
    document = _without(line, options.ignored_keys)
    if "messages" in document:
        return _rendered(document, options, place)
    answers = [key for key in ANSWERS if key in document]
    if "prompt" not in document or len(answers) != 1:
        keys = f"the keys {', '.join(line)}; the answer is under one of {', '.join(ANSWERS)}"
        raise _wrong(place, "is no conversation", f"found {keys}")
    _check_keys(document, ("prompt", answers[0]), place, "a prompt")
    prompt = document["prompt"]
    answer = document[answers[0]]
    for key, text in (("prompt", prompt), (answers[0], answer)):
        if not isinstance(text, str):
            raise _wrong(place, f"has no text under {key!r}", f"found {type(text).__name__}")
    if not answer:
        raise _wrong(place, "has an empty answer", f"{answers[0]!r} is ''")
    as_text = () if options.reads_markup else options.special
    markup = next((name for name in as_text if name in prompt + answer), "")
    # The span is the whole answer, which ends the text.
    return MarkedText(prompt + answer, ((len(prompt), len(prompt) + len(answer)),), is_rendered=False, markup=markup)


def _without(value: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """The keys that say something: those that are neither ignored nor null, as in transformers."""
    return {key: inner for key, inner in value.items() if key not in ignored and inner is not None}


def _check_keys(value: Mapping[str, Any], known: Iterable[str], place: str, of: str) -> None:
    known = tuple(known)
    for key in value:
        if key not in known:
            why = _NOT_FOLLOWED.get(key, "it would be left out without a word")
            raise DataError(
                f"{place} has a key that is not followed: {key!r}",
                rule="chat-keys: every key of a line and of a message is followed or refused",
                picture=f"{why}\nknown keys of {of}: {', '.join(known)}",
                repair=f"remove the key, or leave it out with --ignore_key={key}",
            )


def _rendered(document: dict[str, Any], options: ChatOptions, place: str) -> MarkedText:
    """The text that the template writes, and the answers in it."""
    template = options.templates.get(TOOL_USE if "tools" in document and TOOL_USE in options.templates else DEFAULT)
    if template is None:
        raise DataError(
            f"{place} has messages, and the tokenizer no chat template",
            rule="chat-template: messages become text by the template of the tokenizer",
            picture=f"--tokenizer={options.tokenizer}: no chat_template.jinja and no chat_template in"
            " tokenizer_config.json beside it",
            repair=f"put one of them beside its {FILE}, or write lines of prompt and answer",
        )
    variables = _checked_variables(document, template, place)
    messages = _checked_messages(document["messages"], template, options, place)
    _check_texts(variables, () if options.reads_markup else options.special, f"{place} ")
    messages = [_with_reasoning(message) for message in messages]
    learned = [i for i, message in enumerate(messages) if _is_learned(message, i + 1, place)]
    if not learned:
        raise _wrong(place, "has no answer", "no message has the role 'assistant' and is learned; answers alone are")
    try:
        text, spans = template.render(messages, variables, answers=learned)
        if template.marks_answers:
            spans = _without_unlearned(spans, messages, learned, template, variables, place)
    except RefusedError as error:
        raise _wrong(place, "is refused by the chat template", f"{template.path}: {error}") from error
    told = tuple(span for span in spans if span is not None)
    if len(told) < len(spans):
        raise _wrong(
            place,
            "has answers that the template writes otherwise once other messages follow",
            f"{template.path}: where an answer begins and ends cannot be told",
            repair="mark the answers in the template by {% generation %} ... {% endgeneration %}, or give each"
            " answer a line of its own, with the messages before it",
        )
    return MarkedText(text, told, is_rendered=True)


def _checked_variables(document: Mapping[str, Any], template: ChatTemplate, place: str) -> dict[str, Any]:
    """The variables that the template reads beside the messages."""
    _check_keys(document, _OF_MESSAGES, place, "messages")
    variables = {key: document[key] for key in _LISTS if key in document}
    for key, value in variables.items():
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise _wrong(place, f"has no list of objects under {key!r}", f"found {type(value).__name__}")
    more = document.get(_VARIABLES, {})
    if not isinstance(more, dict) or not more.keys().isdisjoint(_RESERVED):
        picture = f"variables with names other than {', '.join(_RESERVED)}"
        raise _wrong(place, f"has no variables under {_VARIABLES!r}", f"it is an object: {picture}")
    variables |= more
    known = (*template.variables, *(key for key in _LISTS if not variables.get(key)))  # an empty list says nothing
    _check_keys(variables, known, place, f"the template, which reads no other variable ({template.path})")
    return variables


def _checked_messages(messages: Any, template: ChatTemplate, options: ChatOptions, place: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise _wrong(place, "has no messages", f"found {type(messages).__name__}")
    names = set(template.names)
    if not names.isdisjoint(_REASONING):
        names.update(_REASONING)
    checked = []
    for number, message in enumerate(messages, 1):
        where = f"{place} message {number}"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise _wrong(where, "has an unknown role", f"found {role!r}; roles: {', '.join(ROLES)}")
        message = _without(message, options.ignored_keys)
        # A key of an answer would be left out without a word where the template does not read it.
        read = [key for key in _CONTENT if key in names or not message.get(key)]
        others = [key for key in message if key in names and key not in _CONTENT + _OF_MESSAGE]
        _check_keys(message, (*_OF_MESSAGE, *read, *others), where, f"a message ({template.path})")
        content = message.get("content")
        says_more = any(message.get(key) for key in _CONTENT)
        if not isinstance(content, str) and not (content is None and says_more):
            raise _wrong(where, "has no text", f"'content' is of type {type(content).__name__}")
        if role == "assistant" and not (content or says_more):
            raise _wrong(where, "is an empty answer", "'content' is ''")
        _check_texts(message, () if options.reads_markup else options.special, f"{where} ")
        checked.append(message)
    return checked


def _check_texts(value: Any, special: Sequence[str], where: str) -> None:
    """Raises DataError if the name of a special token, or a mark, stands anywhere in `value`."""
    # A character between texts, so that no name is put together from two of them.
    text = "\0".join(_texts(value))
    for name in (*special, BEGIN, END, _MARK):
        if name in text:
            raise _wrong(
                where.rstrip(),
                "has the name of a special token in its text",
                f"found {name!r}: it would end or begin a message",
                repair="correct or remove the line; or read such names as these tokens, with --markup",
            )


def _texts(value: Any) -> Iterator[str]:
    """All texts and keys in `value`, which may be nested deeper than Python's calls."""
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case list() as several:
                left.extend(several)
            case dict() as by_key:
                left.extend(by_key)
                left.extend(by_key.values())


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message as transformers gives it to templates, of which each knows one name of its reasoning."""
    said = [message[key] for key in _REASONING if key in message]
    # The message's own `thinking` wins over what other names say, as in transformers.
    return {"thinking": said[0], **message, "reasoning_content": said[0]} if said else message


def _is_learned(message: Mapping[str, Any], number: int, place: str) -> bool:
    said = {key: message[key] for key in _LEARNED if key in message}
    is_answer = message["role"] == "assistant"
    # True and False equal 1 and 0. A message that is no answer may only say that it is not learned.
    wrong = [key for key, value in said.items() if value not in ((0, 1) if is_answer else (0,))]
    if wrong or len(set(map(bool, said.values()))) > 1:
        raise _wrong(
            f"{place} message {number}",
            "says what is learned in a way that is not followed",
            f"found {', '.join(f'{key}={value!r}' for key, value in said.items())}, role {message['role']!r}; each is"
            " 0, false, 1 or true, all say the same, and answers alone are learned",
        )
    return is_answer and all(said.values())


def _without_unlearned(
    spans: list[Span | None],
    messages: list[dict[str, Any]],
    learned: Sequence[int],
    template: ChatTemplate,
    variables: Mapping[str, Any],
    place: str,
) -> list[Span | None]:
    """The `spans` that the template marks without those of answers that are not learned.

    A second text, in which the texts of each answer end with its number, shows whose they are.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    others = set(answers) - set(learned)
    if not others:
        return spans

    def numbered(i: int, message: dict[str, Any]) -> dict[str, Any]:
        texts = [key for key in ("content", *_REASONING) if isinstance(message.get(key), str)] or ["content"]
        return {**message, **{key: f"{message.get(key, '')}{_MARK}{i}{_MARK}" for key in texts}}

    shown = [numbered(i, message) if i in answers else message for i, message in enumerate(messages)]
    text, shown_spans = template.render(shown, variables)
    parts = [text[slice(*span)] for span in shown_spans if span]
    of_spans = [set(map(int, re.findall(f"{_MARK}([0-9]+){_MARK}", part))) for part in parts]
    # Every marked part must be of learned answers alone or of others alone, and say so by a number.
    are_told = all(len(numbers) > 0 and (numbers <= others or not numbers & others) for numbers in of_spans)
    if len(of_spans) != len(spans) or not are_told or not others <= set().union(*of_spans):
        raise _wrong(
            place,
            "has an answer that is not learned, and the template does not show which of its marks are this answer's",
            f"{template.path}: {len(spans)} parts are marked by {{% generation %}}",
            repair="give each answer a line of its own, with the messages before it",
        )
    return [span for span, numbers in zip(spans, of_spans, strict=True) if not numbers & others]


def _wrong(place: str, what: str, picture: str, repair: str = "correct or remove the line") -> DataError:
    return DataError(f"{place} {what}", rule=_RULE, picture=picture, repair=repair)
