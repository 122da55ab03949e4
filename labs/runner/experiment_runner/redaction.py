"""Secrets are found, by value and by shape, before anything is written. Standard library only, Python 3.9."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

SECRET_NAMES = re.compile(r"(_|^)(KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
SHORTEST = 12
"""A shorter value of such a variable may as well be an ordinary word."""

SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{30,}|rpa_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{36,}"
    r"|github_pat_[A-Za-z0-9_]{40,}|AKIA[0-9A-Z]{16}|wandb_v1_[A-Za-z0-9_]{30,})"
)
"""Keys that say by their beginning what they are. Bare hexadecimal digits are not among them: hashes look the same."""


class Secrets:
    """The values that must not be written anywhere."""

    def __init__(self, values: Mapping[str, str]) -> None:
        """`values` by the name under which a person knows them."""
        self._names: dict[str, str] = {}
        for name, value in values.items():
            for form in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]):
                self._names[form] = name
        longest_first = sorted(self._names, key=len, reverse=True)
        known = "|".join(map(re.escape, longest_first))
        self._pattern = re.compile(f"{known}|{SHAPES.pattern}" if known else SHAPES.pattern)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Secrets:
        """Those of the environment variables whose names say that they are secret."""
        chosen = {name: value for name, value in environment.items() if SECRET_NAMES.search(name)}
        return cls({name: value for name, value in chosen.items() if len(value.strip()) >= SHORTEST})

    def find(self, text: str) -> list[str]:
        """What is in the text, by name; sorted, each once."""
        return sorted({self._name_of(match[0]) for match in self._pattern.finditer(text)})

    def redact(self, text: str) -> str:
        """The text with each secret replaced by its name."""
        return self._pattern.sub(lambda match: f"[{self._name_of(match[0])} removed]", text)

    def _name_of(self, found: str) -> str:
        return self._names.get(found, "something that looks like a key")
