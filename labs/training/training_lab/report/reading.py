"""Taking values out of files that may be damaged, of another version, or hostile: what is not as it should be is None.

Whatever passes `clean` can be written as strict JSON and as UTF-8, and added up without overflow. Pure.
"""

from __future__ import annotations

import math
from typing import Any

MOST_NUMBER = 1e30
"""Far beyond any figure of a run, and far from where sums overflow."""
DEEPEST = 30
"""How many objects and lists within each other are kept; the lab's own files have six."""


def clean(value: Any, depth: int = 0) -> Any:
    """A value from a JSON file without what strict JSON cannot say: numbers that are not finite become None, halves of
    surrogate pairs their escapes, and what is nested too deep is left out."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    if isinstance(value, (dict, list)) and depth >= DEEPEST:
        return None
    if isinstance(value, dict):
        return {clean(key): clean(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [clean(one, depth + 1) for one in value]
    return value


def at(value: Any, *keys: str) -> Any:
    """What is at a path of nested objects; None where the path ends early."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number(value: Any) -> Any:
    """A finite number as it is, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int):
        return value if abs(value) <= int(MOST_NUMBER) else None
    return value if math.isfinite(value) and abs(value) <= MOST_NUMBER else None


def words(value: Any, at_most: int = 2000) -> str:
    """A text, cut if it is longer than anything the lab writes there; empty if there is none."""
    if not isinstance(value, str):
        return ""
    return value if len(value) <= at_most else f"{value[:at_most]}…"


def mapping(value: Any) -> dict[str, Any]:
    """An object, or an empty one."""
    return value if isinstance(value, dict) else {}


def records(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; none if there is no list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def numbers(value: Any) -> dict[str, Any]:
    """The entries of an object that are numbers."""
    return {key: one for key, one in mapping(value).items() if number(one) is not None}
