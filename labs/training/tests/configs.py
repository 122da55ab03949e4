"""Writing configs and reading them back, for the tests of config."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest

from training_lab.config import Config, sections, values_of
from training_lab.errors import UserError
from training_lab.resolve import Resolved, resolve_config


def write(name: str, content: object) -> str:
    """Writes a config: a text or bytes as they are, anything else as JSON."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, (str, bytes)):
        content = json.dumps(content, ensure_ascii=False)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return name


def resolve(content: object, *overrides: str) -> Resolved:
    """What a config with this content, in a file of its own, becomes."""
    return resolve_config(write("config.json", content), overrides)


def config(*overrides: str) -> Config:
    """The defaults, changed by overrides."""
    return resolve({}, *overrides).config


def refusal(name: str, *overrides: str) -> str:
    """The one line with which a config is refused."""
    with pytest.raises(UserError) as caught:
        resolve_config(name, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, f"an error is one line, this is {message!r}"
    assert caught.value.exit_code == 2
    return message


def value_at(resolved: Resolved, key: str) -> Any:
    section, name = key.split(".")
    return values_of(resolved.config)[section][name]


def setting(key: str, value: object) -> dict[str, Any]:
    section, name = key.split(".")
    return {section: {name: value}}


def number_keys() -> dict[str, type]:
    """Every setting that is a number, with its type."""
    found = {}
    for section, cls in sections().items():
        hints = typing.get_type_hints(cls)
        found.update({f"{section}.{name}": kind for name, kind in hints.items() if kind in (int, float)})
    return found
