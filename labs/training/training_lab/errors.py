"""The two ways in which a command ends early, each with the exit code that tells a caller which it was."""

from __future__ import annotations


class LabError(Exception):
    """Something that the person should read as one clear line, without a traceback."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        """Whatever the message quotes stays on its line: control characters are shown escaped."""
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in message)
        super().__init__("".join(shown))


class UserError(LabError):
    """A mistake in what the person gave: a config, an argument, a file. Nothing was changed."""

    exit_code = 2
