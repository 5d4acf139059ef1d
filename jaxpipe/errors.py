"""The errors that users see, and their five-part form: where, what, rule, picture, repair.

Every error that jaxpipe can foresee is one of these, raised before anything is compiled. Later come only a
TrainingError, from the numbers of a run, a DataError and a CheckpointError, from files, and a LostProcess.
"""


class JaxpipeError(ValueError):
    """Base of all errors that jaxpipe raises for something the user can mend.

    Attributes:
        exit_status: of a command that ends with it.
    """

    exit_status = 2


class ScheduleError(JaxpipeError):
    """A schedule breaks a rule, has an unknown name or an option outside its domain."""


class CompileError(JaxpipeError):
    """A schedule, mesh and stage functions do not fit together into one program."""


class ConfigError(JaxpipeError):
    """A config field is unknown, has a wrong value, or contradicts another."""


class TrainingError(JaxpipeError):
    """A run has left the finite numbers, or cannot write its own, so that going on would be useless."""


class DataError(JaxpipeError):
    """A file of tokens or of text is damaged, or holds what the model has no words for."""


class CheckpointError(JaxpipeError):
    """A checkpoint cannot be written, or is damaged."""


class LostProcess(JaxpipeError):  # noqa: N818  # it says what happened
    """Another process of the run has not come, has ended or is stuck, so that this one cannot go on."""

    exit_status = 76  # so that a scheduler may start the run again


def closest(name: str, known: list[str]) -> str:
    """The known name that is most like `name`, as ` Did you mean 'x'?`, or an empty text."""
    import difflib

    found = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f" Did you mean {found[0]!r}?" if found else ""
