"""How a field of a config is declared: its limits, when it has an effect, and a default that follows from others.

Standard library only, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple

Getter = Callable[[str], Any]


class Problem(NamedTuple):
    """Something that cannot be run, or that works but is likely not what was meant."""

    key: str
    message: str
    is_fatal: bool = True


class Derived(NamedTuple):
    """The default of a field that follows from other fields: the rule, and the rule in words."""

    says: str
    rule: Callable[[Getter], Any]


def derived(says: str, rule: Callable[[Getter], Any], **limits: Any) -> Any:
    """A field whose default is computed from other fields, by their dotted names."""
    return field(default=Derived(says, rule), metadata=limits)


def setting(default: Any, **limits: Any) -> Any:
    """A field with limits: `at_least`, `above`, `at_most`, `below`; or `only=(key, value, ...)`, without one of which
    it has no effect."""
    return field(default=default, metadata=limits)
