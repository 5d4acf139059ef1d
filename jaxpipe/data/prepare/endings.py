"""The tokens at which a generated text ends: those of the tokenizer's files, and what ends an answer in its template.

A base model's files often name the end of a document alone, and its chat template ends a turn otherwise, as Qwen's does
with `<|im_end|>`: a model that was tuned on chats stops there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpipe.data.prepare.chat import read_template
from jaxpipe.data.protocols import Tokenizer
from jaxpipe.data.tokenizer import BYTE

_QUESTION, _ANSWER = "question", "answer"


def ends_of_text(name: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens at which a text that a model generates ends.

    Args:
        name: of the tokenizer, as `data.tokenizer`.
        tokenizer: the tokenizer itself.

    Returns:
        The tokenizer's own `ends`; and the first special token that the chat template beside it writes after an answer,
        if there is a template that can write a question and its answer.
    """
    if name == BYTE or tokenizer.masked is not None:
        return tokenizer.ends
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = rendered(name, messages) or ""
    except Exception:  # whatever the code of the template does: texts that are no chats do not need it
        text = ""
    special = set(tokenizer.special_tokens)
    after = tokenizer.encode_places([text.rpartition(_ANSWER)[2]])[0][0].tolist()
    return tuple(dict.fromkeys([*tokenizer.ends, *[token for token in after if token in special][:1]]))


def rendered(name: str, messages: Sequence[Mapping[str, str]], *, is_asked: bool = False) -> str | None:
    """Returns what the chat template beside the tokenizer `name` makes of `messages`; None if there is no template.

    Args:
        name: of the tokenizer, as `data.tokenizer`.
        messages: with "role" and "content" each.
        is_asked: whether the beginning of the next answer follows.
    """
    template = read_template(name)
    return None if template is None else template.render(messages, is_asked=is_asked)
