"""The two ways in which a command ends early; the runner has the same, and its commands are among the lab's."""

from __future__ import annotations

from experiment_runner.errors import InputError as UserError
from experiment_runner.errors import RunnerError as LabError

__all__ = ["LabError", "UserError"]
