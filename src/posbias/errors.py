"""The errors a user can meet, each one line that names the value and what is allowed.

`UsageError` is a wrong request (exit code 2), `RunError` a run that could not be finished (exit code 1).
Both derive from ValueError / RuntimeError so that library users need not import them.
"""


class UsageError(ValueError):
    """The request is wrong: an unknown name, a value out of range, a length that does not fit."""


class RunError(RuntimeError):
    """The request was fine, but the run could not be finished (NaN gradients, a full disk ...)."""
