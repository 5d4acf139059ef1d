"""The check of a field that takes one of a few words."""

from __future__ import annotations

from jaxpipe.errors import ConfigError, closest


def check_choice(path: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `known`.

    Args:
        path: of the field, as "model.dtype".
    """
    if value not in known:
        raise ConfigError(
            f"{path}={value!r} is not known.{closest(value, list(known))}\n"
            f"  rule field-choice: {path} is one of {', '.join(sorted(known))}\n"
            f"  repair: set {path} to one of these"
        )
