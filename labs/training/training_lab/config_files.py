"""Config files as they are written: JSON or YAML, with what is wrong said by file, line and key.

Standard library only, Python 3.9; YAML where PyYAML is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training_lab.errors import UserError

EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"


def label_of(path: Path) -> str:
    """How a file is named to people: from the current directory, or from the experiments' folder, if it is there."""
    resolved = path.resolve()
    for base in (Path.cwd(), EXPERIMENTS.parent):
        try:
            return resolved.relative_to(base).as_posix()
        except ValueError:
            continue
    return path.as_posix()


def read_mapping(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The bytes and the top mapping of a JSON or YAML file, with duplicated keys refused."""
    label = label_of(path)
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{label}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: byte {error.start}: not UTF-8; save the file as UTF-8") from error
    values = parse_json(text, label) if path.suffix == ".json" else parse_yaml(text, label)
    if not isinstance(values, dict):
        raise UserError(f"{label}: must hold an object of settings, got {show(values)}")
    return content, values


def parse_json(text: str, label: str) -> Any:
    """JSON with neither duplicated keys nor NaN."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UserError(f"{label}: {key}: written twice in the same object; keep one of them")
            found[key] = value
        return found

    def refuse(constant: str) -> Any:
        raise UserError(f"{label}: {constant} is not a number that a setting can have")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise UserError(f"{label}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets within brackets
        raise UserError(f"{label}: cannot be read as JSON: {error}") from error


def parse_yaml(text: str, label: str) -> Any:
    """YAML with duplicated keys refused, where PyYAML is installed."""
    try:
        import yaml
    except ImportError as error:
        raise UserError(
            f"{label}: reading YAML needs PyYAML (pip install pyyaml); or write the config as JSON"
        ) from error

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys: set[str] = set()
            for key_node, _ in node.value:
                line = key_node.start_mark.line + 1
                if not isinstance(key_node, yaml.ScalarNode):
                    raise UserError(f"{label}:{line}: a key must be a plain word")
                if key_node.value in keys:
                    raise UserError(
                        f"{label}:{line}: {key_node.value}: written twice in the same mapping; keep one of them"
                    )
                keys.add(key_node.value)
            return super().construct_mapping(node, deep)

    try:
        values = yaml.load(text, UniqueKeyLoader)
        json.dumps(values, default=str, skipkeys=True)  # refuses what contains itself
        return values
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{label}:{mark.line + 1}:{mark.column + 1}" if mark else label
        raise UserError(f"{place}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{label}: not valid YAML: {error}") from error


def show(value: Any) -> str:
    """A value as it would be written in JSON, with its kind where that is what is wrong."""
    try:
        written = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        written = repr(value)
    written = written if len(written) <= 80 else f"{written[:80]}…"
    return f"the text {written}" if isinstance(value, str) else written
