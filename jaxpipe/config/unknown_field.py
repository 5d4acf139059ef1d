"""The error for a field that a config does not have, from what ml_collections raises."""

from __future__ import annotations

import re

from jaxpipe.config.model import example_of, model_section
from jaxpipe.errors import ConfigError
from jaxpipe.models import FAMILIES


def unknown_field(error: BaseException, *, where: str, repair: str) -> ConfigError:
    """A field is unknown or of the wrong type; one of another family is named as that.

    Args:
        error: an AttributeError, KeyError or TypeError of a ConfigDict.
        where: what was being read.
        repair: what the user can do, where the field is of no family.
    """
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    text = str(error.args[0] if error.args else error)
    other = None if isinstance(error, TypeError) else _other_families(text)
    if other:
        field, families = other
        return ConfigError(
            f"model.{field} is no field of this model's family, in {where}\n"
            f"  rule model-family: a model has the fields of its family, and {field} is one of"
            f" model.family={' or '.join(map(repr, families))} alone\n"
            f"  repair: leave it out, or take a config of base_config(family={families[0]!r})"
            + example_of(FAMILIES[families[0]])
        )
    return ConfigError(
        f"a field is unknown or of the wrong type, in {where}\n"
        + "\n".join(f"  {line}" for line in text.strip("\"'").splitlines())
        + "\n  rule config-fields: the fields and their types are those of jaxpipe.config.base_config()\n"
        f"  repair: {repair}"
    )


def _other_families(text: str) -> tuple[str, list[str]] | None:
    """The field that `text` names first, and the families that have it where not all do."""
    quoted = re.search(r"""["'](\w+)["']""", text)
    families = [name for name in FAMILIES if quoted and quoted[1] in model_section(name)]
    return (quoted[1], families) if quoted and 0 < len(families) < len(FAMILIES) else None
