"""How a command ends early: each kind has the exit code that tells a caller which it was."""

from __future__ import annotations


class RunnerError(Exception):
    """Something that the person should read as one clear line, without a traceback."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        """Whatever the message quotes stays on its line: control characters are shown escaped."""
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in message)
        super().__init__("".join(shown))


class InputError(RunnerError):
    """A mistake in what the person gave: a file, a setting, an argument. Nothing was changed."""

    exit_code = 2
