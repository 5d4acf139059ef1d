"""The tokens at which a generated text ends: those of the tokenizer's files, and what ends an answer in its template.

A base model's files often name the end of a document alone, and its chat template ends a turn otherwise, as Qwen's does
with `<|im_end|>`: a model that was tuned on chats stops there.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxpipe.data.prepare.templates import ChatTemplate, RefusedError
from jaxpipe.data.protocols import Tokenizer
from jaxpipe.data.special_tokens import DEFAULT
from jaxpipe.errors import ConfigError

_QUESTION = "question"
_ANSWER = "answer"


def ends_of_text(tokenizer: Tokenizer, templates: Mapping[str, ChatTemplate]) -> tuple[int, ...]:
    """Returns the tokens at which a text that a model generates ends.

    They are the tokenizer's own, and the first special token that the default one of its `templates` writes after an
    answer, if there is one that can write a question and its answer.
    """
    if DEFAULT not in templates or tokenizer.masked is not None:
        return tokenizer.ends
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        text, _ = templates[DEFAULT].render(messages, {})
    except (RefusedError, ConfigError):  # texts that are no chats do not need it
        return tokenizer.ends
    # After the last one: a template may have the word itself.
    after = text.rpartition(_ANSWER)[2]
    # By its name, since the vocabulary may lack what else the template writes. Of two names the longer one is read.
    names = tokenizer.special_tokens.items()
    placed = sorted((after.find(name), -len(name), token) for token, name in names if name in after)
    return tuple(dict.fromkeys([*tokenizer.ends, *[token for _, _, token in placed[:1]]]))
