"""The errors that users see, and their five parts: where, what, rule, picture, repair.

jaxpipe raises one of these for every error that it can foresee, before anything is compiled. Only four kinds can come
later: TrainingError (the numbers of a run), DataError and CheckpointError (its files), and LostProcess.
"""

from __future__ import annotations

from collections.abc import Sequence

# Bounds of a part of a message; somewhat longer lines stay whole.
MOST_LINES = 30
MOST_CHARACTERS = 200


class JaxpipeError(ValueError):
    """Base of all errors that jaxpipe raises for something the user can repair; `explain` lays out their text.

    Args:
        what: the place of the error and what is wrong; without `rule`, the whole text.
        rule, repair, picture: see `explain`.

    Attributes:
        exit_status: exit status of a command that ends with this error.
    """

    exit_status = 2

    def __init__(self, what: str, *, rule: str = "", repair: str = "", picture: str = "") -> None:
        # Exceptions are copied between processes by their first argument alone, which must be the finished text.
        super().__init__(explain(what, rule=rule, repair=repair, picture=picture) if rule else what)


class ScheduleError(JaxpipeError):
    """A schedule breaks a rule, or has an unknown name or an illegal option."""


class CompileError(JaxpipeError):
    """A schedule, mesh and stage functions do not fit together into one program."""


class ConfigError(JaxpipeError):
    """A config field is unknown, has a wrong value, or contradicts another."""


class TrainingError(JaxpipeError):
    """The losses of a run are no longer finite, or its metrics cannot be written."""


class DataError(JaxpipeError):
    """A file of tokens or text is damaged, or contains tokens outside the model's vocabulary."""


class CheckpointError(JaxpipeError):
    """A checkpoint cannot be written, or is damaged."""


class LostProcess(JaxpipeError):  # noqa: N818  # it says what happened
    """Another process of the run did not join, has ended or is stuck, so this one cannot continue."""

    exit_status = 76  # a scheduler may start the run again


def explain(what: str, *, rule: str, repair: str, picture: str = "") -> str:
    """The text of an error in its five parts: where and what, rule, picture, repair.

    Args:
        what: the place of the error and what is wrong, one sentence; further lines are indented.
        rule: the rule that is broken, as "name: what always holds".
        repair: a way for the user to repair it.
        picture: lines that show the error; their own indentation is kept.

    Example:
        >>> print(explain(
        ...     "mesh.pipe=3 for model.num_layers=2",
        ...     rule="layer-per-stage: every stage holds at least one layer",
        ...     picture="3 stages, 2 layers",
        ...     repair="set mesh.pipe=2 or less",
        ... ))
        mesh.pipe=3 for model.num_layers=2
          rule layer-per-stage: every stage holds at least one layer
              3 stages, 2 layers
          repair: set mesh.pipe=2 or less
    """
    # Further lines stand deeper than the rule, so that they are read as one sentence.
    what = shortened(what).replace("\n", "\n  ")
    picture = shortened(picture)
    lines = [what, f"  rule {shortened(rule)}", *(f"      {line}" for line in picture.splitlines())]
    return "\n".join([*lines, f"  repair: {shortened(repair)}"])


def shortened(text: str, *, most_lines: int = MOST_LINES) -> str:
    """`text` with at most `most_lines` lines, and long ones cut; says what is missing.

    Example:
        >>> print(shortened("x" * 10_000)[-36:])
        xxxxxxxxxx... (10,000 characters)
    """
    lines = text.splitlines()
    if len(lines) > most_lines:
        # - 1: the line that counts the rest takes a line itself.
        lines = [*lines[: most_lines - 1], f"... and {len(lines) - most_lines + 1:,} lines more"]
    cut = (f"{line[:MOST_CHARACTERS]}... ({len(line):,} characters)" for line in lines)
    # Twice the bound, so that a line is not cut to save a few letters.
    return "\n".join(short if len(line) > 2 * MOST_CHARACTERS else line for line, short in zip(lines, cut, strict=True))


def first_of(texts: Sequence[str], *, joined_by: str = "\n", most: int = 5) -> str:
    """The first of `texts`, and how many more there are.

    Example:
        >>> first_of(["a", "b", "c", "d", "e", "f", "g"], joined_by=", ")
        'a, b, c, d, e, and 2 more'
    """
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return joined_by.join([*texts[:most], *more])


def check_choice(path: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError unless the field's `value` is one of `known`.

    Args:
        path: the path of the field, as "model.dtype".
    """
    if value not in known:
        raise ConfigError(
            f"{path}={value!r} is not known.{closest(value, list(known))}",
            rule=f"field-choice: {path} is one of {', '.join(sorted(known))}",
            repair=f"set {path} to one of these",
        )


def closest(name: str, known: list[str]) -> str:
    """A hint at the known name that is most like `name`, ` Did you mean 'x'?`; empty if none is."""
    # Imported here: it takes longer than the rest of this module, and most commands never fail.
    import difflib

    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""
