"""The two ways in which a command ends early, each with the exit code that tells a caller which it was."""

from __future__ import annotations


class LabError(Exception):
    """Something that the person should read as one clear line, without a traceback."""

    exit_code = 1


class UserError(LabError):
    """A mistake in what the person gave: a config, an argument, a file. Nothing was changed."""

    exit_code = 2
