"""Settings from JSON into frozen dataclasses, strictly: what is unknown, missing or of the wrong type is refused by its
key, with the nearest key that there is."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NewType, TypeVar

from experiment_runner.errors import InputError

Seconds = NewType("Seconds", float)
"""A duration: written as a number of seconds, or as `90s`, `20m`, `2h`."""

UNITS_S = {"s": 1, "m": 60, "h": 3600}
T = TypeVar("T")


def read_json_file(path: Path) -> Any:
    """The content of a JSON file, with duplicated keys refused. Raises InputError with the place of what is wrong."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, _ in pairs:
            if sum(other == key for other, _ in pairs) > 1:
                raise InputError(f"{path}: {key}: written twice in the same object; keep one of them")
        return dict(pairs)

    try:
        return json.loads(path.read_text("utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from error


def read_settings(kind: type[T], values: Any, label: str, key: str = "") -> T:
    """`values` as an instance of the dataclass `kind`; `label` is the file, `key` the path in it."""
    at = f"{key}." if key else ""
    if not isinstance(values, Mapping):
        raise InputError(f"{label}: {key or 'the file'}: must be an object of settings, got {show(values)}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for name in values:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1, 0.5)
            advice = f"the nearest is {at}{near[0]}" if near else f"there are {', '.join(fields)}"
            raise InputError(f"{label}: {at}{name}: unknown key; {advice}")
    found = {}
    for name, field in fields.items():
        if name in values:
            found[name] = read_value(hints[name], values[name], label, f"{at}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"{label}: {at}{name}: missing")
    made = kind(**found)
    for name, problem in getattr(made, "problems", lambda: ())():
        raise InputError(f"{label}: {at}{name}: {problem}")
    return made


def read_value(hint: Any, value: Any, label: str, key: str) -> Any:
    """One value of the type `hint`. Raises InputError with the key if it is of another."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return read_settings(typing.cast("type[Any]", hint), value, label, key)
    if origin is tuple and isinstance(value, (list, tuple)):
        inner = typing.get_args(hint)[0]
        return tuple(read_value(inner, item, label, f"{key}[{index}]") for index, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        inner = typing.get_args(hint)[1]
        return {str(name): read_value(inner, item, label, f"{key}.{name}") for name, item in value.items()}
    if hint is Any:
        return value
    if hint is Seconds:
        return Seconds(read_duration(value, label, key))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number and abs(value) < float("inf"):
        return float(value)
    if hint in (str, bool, int) and type(value) is hint:
        return value
    wanted = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
    expected = wanted.get(hint) or ("a list" if origin is tuple else "an object")
    raise InputError(f"{label}: {key}: must be {expected}, got {show(value)}")


def read_duration(value: Any, label: str, key: str) -> float:
    """Seconds, from a number of them or a text such as `20m`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", value) if isinstance(value, str) else None
    if match is None:
        raise InputError(f"{label}: {key}: must be a duration such as 90s, 20m or 2h, got {show(value)}")
    return float(match[1]) * UNITS_S[match[2]]


def show(value: Any) -> str:
    """A value as it would be written in JSON, cut short."""
    written = json.dumps(value, ensure_ascii=False, default=str)
    written = written if len(written) <= 80 else f"{written[:80]}…"
    return f"the text {written}" if isinstance(value, str) else written
