"""The special tokens that the files beside a tokenizer.json name, as transformers reads them; one of them ends texts.

Goes in: the path of a tokenizer.json. Comes out: what tokenizer_config.json, special_tokens_map.json, the chat template
and generation_config.json say. Beside PREFIX.tokenizer.json they have the PREFIX, too. Left to others: the vocabulary
(`tokenizer`), and how a template is rendered (`prepare.templates`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.files import read_whole

FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
DEFAULT = "default"  # name of a template that has none
TOKENS_MAP = "special_tokens_map.json"
# The first that has the field counts: transformers makes generation_config.json of config.json where there is none, and
# jaxpipe.prepare writes tokenizer_config.json alone.
WITH_END_IDS = ("generation_config.json", "config.json", TOKENIZER_CONFIG)
END = "eos_token"
END_ID = "eos_token_id"
_TEMPLATE = "chat_template"
_ADDED = "added_tokens_decoder"
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens, ends and templates that the files beside a tokenizer.json name."""

    named: Mapping[str, str]  # the text of each token by its name, as "eos_token"
    others: tuple[str, ...]  # further special tokens
    end_ids: tuple[int, ...]  # the tokens at which a generated text ends; they may not be in the vocabulary
    end_ids_from: str  # the file that has these
    templates: Mapping[str, str]  # the text of each chat template by its name, "default" of a single one
    template_files: Mapping[str, Path]  # the file that each comes from

    @property
    def names(self) -> tuple[str, ...]:
        """All names of special tokens, each once."""
        return tuple(dict.fromkeys((*self.named.values(), *self.others)))

    def to_json(self, known: frozenset[str]) -> dict[str, Any]:
        """One tokenizer_config.json that says the same of the tokens in `known`, without `end_ids`."""
        named = {name: token for name, token in self.named.items() if token in known}
        others = [token for token in self.others if token in known and token not in named.values()]
        lists = {_LISTS[0]: others} if others else {}
        several = [{"name": name, "template": text} for name, text in self.templates.items()]
        template = self.templates[DEFAULT] if [*self.templates] == [DEFAULT] else several
        return named | lists | ({_TEMPLATE: template} if template else {})


def beside(path: Path, name: str) -> Path:
    """Returns the path of the file `name` that belongs to the tokenizer.json at `path`.

    Example:
        >>> beside(Path("data/all.tokenizer.json"), "tokenizer_config.json")
        PosixPath('data/all.tokenizer_config.json')
    """
    # PREFIX.tokenizer.json has its companions under the same PREFIX.
    return path.with_name((path.name.removesuffix(FILE) if path.name.endswith(FILE) else "") + name)


def files_beside(path: Path) -> tuple[Path, ...]:
    """The files beside the tokenizer.json at `path` that `read_special_tokens` reads; some may not be there."""
    names = dict.fromkeys((TOKENIZER_CONFIG, TOKENS_MAP, *WITH_END_IDS, TEMPLATE))
    return *(beside(path, name) for name in names), *_more_templates(path)


def read_special_tokens(path: Path) -> SpecialTokens:
    """Returns what the files beside the tokenizer.json at `path` say; nothing where there are none.

    Raises:
        ConfigError: a file is damaged.

    Source: `from_pretrained` of transformers 5, tokenization_utils_base.py.
    """
    config, of_map = (_read_json(beside(path, name)) for name in (TOKENIZER_CONFIG, TOKENS_MAP))
    # A config that lists its added tokens is newer than special_tokens_map.json; without that list the latter counts.
    both = of_map | config if _ADDED in config else config | of_map
    lists = [value for value in (both.get(name) for name in _LISTS) if value]
    others = [token for value in lists if isinstance(value, list) for token in value]
    added = both.get(_ADDED)
    added = added.values() if isinstance(added, dict) else ()
    others += [token for token in added if isinstance(token, dict) and token.get("special") is True]
    by_name = {name: value for name, value in both.items() if name.endswith("_token")}
    for value in lists:
        by_name |= value if isinstance(value, dict) else {}
    named = {name: text_of(token) for name, token in by_name.items() if text_of(token)}
    end_ids, end_ids_from = _end_ids(path)
    templates, template_files = _templates(path, config.get(_TEMPLATE))
    texts = tuple(dict.fromkeys(filter(None, map(text_of, others))))
    return SpecialTokens(named, texts, end_ids, end_ids_from, templates, template_files)


def _templates(path: Path, in_config: Any) -> tuple[dict[str, str], dict[str, Path]]:
    """The texts of chat templates by their names, and the file of each: chat_template.jinja comes before the config."""
    if beside(path, TEMPLATE).is_file():
        files = {DEFAULT: beside(path, TEMPLATE), **{file.stem: file for file in _more_templates(path)}}
        return {name: _read(file) for name, file in files.items()}, files
    config = beside(path, TOKENIZER_CONFIG)
    several = in_config if isinstance(in_config, list) else [{"name": DEFAULT, "template": in_config}]
    named: list[Any] = [(entry.get("name"), entry.get("template")) for entry in several if isinstance(entry, dict)]
    if in_config and (len(named) < len(several) or not all(isinstance(text, str) for pair in named for text in pair)):
        raise ConfigError(
            f"{config} has a chat template that cannot be read",
            rule="chat-template: the template is a text, or several have names",
            picture=f"found {type(in_config).__name__}",
            repair="take the file from where the tokenizer comes from",
        )
    templates = dict(named) if in_config else {}
    return templates, dict.fromkeys(templates, config)


def _more_templates(path: Path) -> list[Path]:
    return sorted(beside(path, TEMPLATES).glob("*.jinja"))


def text_of(token: Any) -> str:
    """The text of a special token, which a file has as a text or as an object with "content"; "" for anything else."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _end_ids(path: Path) -> tuple[tuple[int, ...], str]:
    for name in WITH_END_IDS:
        value = _read_json(beside(path, name)).get(END_ID)
        # Not `isinstance`, for which true and false are numbers.
        ids = tuple(number for number in (value if isinstance(value, list) else [value]) if type(number) is int)
        if ids:
            return ids, name
    return (), ""


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no file, or no object in it."""
    content = _read(path, json.loads) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _read(path: Path, parse: Callable[[str], Any] = str) -> Any:
    try:
        return parse(read_whole(path))
    # JSON nested too deep is an error of recursion and no ValueError.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read",
            rule=f"tokenizer-config: the files beside a {FILE} are JSON, and a template is text",
            picture=str(error),
            repair="take the file from where the tokenizer comes from",
        ) from error
