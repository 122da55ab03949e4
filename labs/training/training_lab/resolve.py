"""From config files and `--set` to one checked `Config`, with the origin of each value.

The order, later over earlier: a field's default, the file at the end of the `extends` chain, ..., the file that was
named, `--set` from left to right; then what follows from other values. Whatever is wrong is said with the file, the
key's whole path and the nearest valid one, before anything else happens. Standard library only, Python 3.9.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import operator
import os
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiment_runner.redaction import Secrets
from training_lab.config import UNIDENTIFIED, Config, fields_by_key, identified_values, sections, values_of
from training_lab.config_files import EXPERIMENTS, label_of, parse_json, read_mapping, show
from training_lab.errors import UserError
from training_lab.identity import identity_of, sha256_of_bytes
from training_lab.settings import Derived

SUFFIXES = (".json", ".yaml", ".yml")
DEFAULT = "default"
DERIVED = "derived: "
FIRST_INEXACT_FLOAT = 2.0**53


class ConfigFile(NamedTuple):
    """A config file as it was read."""

    label: str
    sha256: str


class Resolved(NamedTuple):
    """A config, its name, and where everything in it came from."""

    name: str
    config: Config
    origins: dict[str, str]
    files: list[ConfigFile]
    arguments: tuple[str, ...]
    """What to write after `train` to mean this config again."""

    @property
    def identity(self) -> str:
        """The hash of the resolved values: equal configs have equal identities, however they were written."""
        return identity_of(identified_values(values_of(self.config)))

    def record(self) -> dict[str, Any]:
        """What `config.json` of a run holds; `config_from_record` reads it back."""
        return {
            "name": self.name,
            "identity": self.identity,
            "arguments": list(self.arguments),
            "files": [file._asdict() for file in self.files],
            "values": values_of(self.config),
            "origins": self.origins,
        }

    def changed_lines(self) -> list[str]:
        """Each setting that somebody wrote, with where; for people."""
        values = flatten(values_of(self.config), self.name)
        chosen = {key: o for key, o in self.origins.items() if o != DEFAULT and not o.startswith(DERIVED)}
        return [f"{key} = {json.dumps(values[key])}  ({origin})" for key, origin in chosen.items() if key in values]

    def warnings(self) -> list[str]:
        """What works but is likely not what was meant: values that have no effect, intervals too long."""
        found = [f"{p.key}: {p.message}" for p in self.config.problems() if not p.is_fatal]
        values = flatten(values_of(self.config), self.name)
        for key, one in fields_by_key().items():
            only = one.metadata.get("only")
            is_chosen = self.origins[key] != DEFAULT and not self.origins[key].startswith(DERIVED)
            if only and is_chosen and values[only[0]] not in only[1:]:
                wanted = " or ".join(map(repr, only[1:]))
                found.append(f"{key}: has no effect, because {only[0]} is {values[only[0]]!r} and not {wanted}")
        return found


class Entry(NamedTuple):
    """A value as somebody wrote it, and where."""

    value: Any
    origin: str


def resolve_config(name_or_file: str, overrides: Iterable[str] = ()) -> Resolved:
    """The config named `name_or_file` (`smoke`, or a path), changed by `overrides` such as `train.seed=1`.

    Raises UserError for anything that is wrong with it.
    """
    path = find_config(name_or_file)
    name, files, entries = read_chain(path)
    arguments = ["--config", name_or_file]
    for override in overrides:
        entries.update(read_override(override))
        arguments += ["--set", override]
    config, origins = build(entries)
    resolved = Resolved(name, config, origins, files, tuple(arguments))
    refuse_secrets(resolved)
    return resolved


def refuse_secrets(resolved: Resolved) -> None:
    """Raises UserError if a setting holds a secret: everything in a config is written down."""
    secrets = Secrets.from_environment(os.environ)
    settings = {"purpose": resolved.config.purpose, **flatten(values_of(resolved.config), resolved.name)}
    for key, value in settings.items():
        found = secrets.find(show(value))
        if found:
            origin = resolved.origins.get(key, resolved.name)
            raise UserError(
                f"{origin}: {key}: holds a secret ({', '.join(found)}), and a config is written into the record; take "
                "it out, and put it into the environment"
            )


def config_from_record(record: Mapping[str, Any], label: str) -> Resolved:
    """The config of a run's `config.json`. Raises UserError if it is not one that this version understands."""
    try:
        entries = {key: Entry(value, label) for key, value in flatten(record["values"], label).items()}
        unknown_then = sorted(
            key for key in fields_by_key() if key not in entries and key.partition(".")[0] not in UNIDENTIFIED
        )
        if unknown_then:
            raise UserError(f"{label}: of another version of the lab, which knew no {', '.join(unknown_then[:3])}")
        config, _ = build(entries)
        files = [ConfigFile(**file) for file in record["files"]]
        origins, arguments = dict(record["origins"]), tuple(record["arguments"])
        resolved = Resolved(str(record["name"]), config, origins, files, arguments)
        identity = record["identity"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{label}: not the record of a config ({error})") from error
    if resolved.identity != identity:
        raise UserError(f"{label}: its values do not have the identity that is written in it; it was changed")
    return resolved


def find_config(name_or_file: str) -> Path:
    """The file that a name or path stands for: a path as it is, a name among the experiments."""
    direct = Path(name_or_file)
    if direct.is_file() and direct.suffix in SUFFIXES:
        return direct
    if direct.suffix in SUFFIXES or direct.parent != Path() or direct.exists():
        wrong = f"must be a file ending in {', '.join(SUFFIXES)}" if direct.exists() else "no such config file"
        raise UserError(f"{name_or_file}: {wrong}")
    for suffix in SUFFIXES:
        candidate = EXPERIMENTS / (name_or_file + suffix)
        if candidate.is_file():
            return candidate
    known = sorted({p.stem for p in EXPERIMENTS.glob("*") if p.suffix in SUFFIXES})
    raise UserError(
        f"--config {name_or_file}: no such experiment{nearest(name_or_file, known)}; there are: {', '.join(known)}"
    )


def read_chain(path: Path) -> tuple[str, list[ConfigFile], dict[str, Entry]]:
    """The experiment's name, the files from `path` down its `extends` chain, and their values with the nearest file's
    on top. The `config.json` of a run is such a file: its name and values are those of the run."""
    name = path.stem
    files: list[ConfigFile] = []
    layers: list[dict[str, Entry]] = []
    seen: set[Path] = set()
    following: Path | None = path
    while following is not None:
        if following.resolve() in seen:
            raise UserError(f"{label_of(path)}: extends: goes in a circle through {label_of(following)}")
        seen.add(following.resolve())
        label = label_of(following)
        content, values = read_mapping(following)
        files.append(ConfigFile(label, sha256_of_bytes(content)))
        origins: Any = {}
        if isinstance(values.get("values"), dict) and "identity" in values:
            if following == path:
                name = str(values.get("name", name))
            values, origins = values["values"], dict(values.get("origins") or {})
        following = base_path(following, values.pop("extends")) if "extends" in values else None
        layers.append({key: kept(entry, origins.get(key)) for key, entry in entries_of(values, label).items()})
    merged: dict[str, Entry] = {}
    for layer in reversed(layers):
        merged.update(layer)
    return name, files, merged


def kept(entry: Entry, origin: Any) -> Entry:
    """A value from the record of a run; what nobody chose then, nobody chose now, though it stays what it was."""
    is_chosen = not isinstance(origin, str) or not (origin == DEFAULT or origin.startswith(DERIVED))
    return entry if is_chosen else Entry(entry.value, origin)


def base_path(path: Path, base: Any) -> Path:
    """The file that `extends: base` in the file `path` means: beside it, or an experiment's name."""
    if not isinstance(base, str):
        raise UserError(f"{label_of(path)}: extends: must be a name or a path, got {show(base)}")
    beside = path.parent / base
    candidates = [beside] if beside.suffix in SUFFIXES else [Path(f"{beside}{suffix}") for suffix in SUFFIXES]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    try:
        return find_config(base)
    except UserError as error:
        raise UserError(
            f"{label_of(path)}: extends: {base!r}: no such config beside it or among the experiments"
        ) from error


def read_override(text: str) -> dict[str, Entry]:
    """One `--set key=value`; the value is JSON, or else text."""
    key, equals, written = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text}: must look like optimizer.max_lr=1e-3")
    try:
        value = parse_json(written, f"--set {key}")
    except UserError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            raise
        value = written
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    entries = entries_of(nested, "--set")
    if not entries:
        raise UserError(f"--set {text}: sets nothing; name a setting, such as optimizer.max_lr=1e-3")
    return entries


def entries_of(values: Mapping[str, Any], origin: str) -> dict[str, Entry]:
    """Nested settings by dotted key. Raises UserError for one that does not exist."""
    known = fields_by_key()
    found: dict[str, Entry] = {}
    for key, value in flatten(values, origin).items():
        section = key.partition(".")[0]
        if key in known or key == "purpose":
            found[key] = Entry(value, origin)
        elif key == "extends":
            raise UserError(f"{origin}: extends: only a file can extend another; name the base with --config")
        elif key in sections():
            raise UserError(f"{origin}: {key}: must be an object of settings, got {show(value)}")
        else:
            name = key.rpartition(".")[2]
            elsewhere = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
            if elsewhere:
                raise UserError(
                    f"{origin}: {key}: no setting of that name there; did you mean {' or '.join(elsewhere)}?"
                )
            pool = [k for k in known if k.startswith(section + ".")] if section in sections() else list(known)
            raise UserError(f"{origin}: {key}: unknown key{nearest(key, [*pool, 'extends', 'purpose'])}")
    return found


def flatten(values: Mapping[str, Any], origin: str, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`. An empty object has no keys. Raises UserError for a key with a dot."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if "." in str(key):
            raise UserError(f"{origin}: {dotted}: a key holds no dot; write one object inside the other")
        if isinstance(value, dict):
            found.update(flatten(value, origin, dotted + "."))
        else:
            found[dotted] = value
    return found


def build(entries: Mapping[str, Entry]) -> tuple[Config, dict[str, str]]:
    """The config that `entries` describe, and the origin of each of its values."""
    known = fields_by_key()
    types = {section: typing.get_type_hints(cls) for section, cls in sections().items()}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def value_of(key: str) -> Any:
        if key not in values:
            default = known[key].default
            section, name = key.split(".")
            if key in entries:
                raw, origins[key] = entries[key]
            elif isinstance(default, Derived):
                raw, origins[key] = default.rule(value_of), f"{DERIVED}{default.says}"
            else:
                raw, origins[key] = default, DEFAULT
            values[key] = convert(raw, types[section][name], f"{origins[key]}: {key}")
            check_limits(values[key], known[key].metadata, f"{origins[key]}: {key}")
        return values[key]

    by_section: dict[str, Any] = {}
    for section, cls in sections().items():
        names = [one.name for one in dataclasses.fields(cls)]
        by_section[section] = cls(**{name: value_of(f"{section}.{name}") for name in names})
    purpose = entries.get("purpose", Entry("", DEFAULT))
    config = Config(purpose=convert(purpose.value, str, f"{purpose.origin}: purpose"), **by_section)
    for problem in config.problems():
        if problem.is_fatal:
            raise UserError(f"{origins[problem.key]}: {problem.key}: {problem.message}")
    return config, {key: origins[key] for key in known}


def convert(value: Any, wanted: Any, place: str) -> Any:
    """`value` as the declared type, where nothing is lost by it. Raises UserError otherwise."""
    if typing.get_origin(wanted) is typing.Literal:
        choices = typing.get_args(wanted)
        if value in choices and isinstance(value, str):
            return value
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise UserError(f"{place}: must be one of {', '.join(choices)}; got {show(value)}{hint}")
    if typing.get_origin(wanted) is tuple:
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(text_of(item, place) for item in value)
        raise UserError(f'{place}: must be a list of texts such as ["notes/*.txt"], got {show(value)}')
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is str and isinstance(value, str):
        return text_of(value, place)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = finite(value)
        if wanted is float and number is not None:
            return number + 0.0  # no −0: it would be another identity for an equal value
        is_exact = isinstance(value, int) or abs(value) < FIRST_INEXACT_FLOAT
        if wanted is int and number is not None and value == int(value) and is_exact:
            return int(value)
    words = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}[wanted]
    raise UserError(f"{place}: must be {words}, got {show(value)}{number_hint(value, wanted)}")


def text_of(value: str, place: str) -> str:
    """A text that can be written as UTF-8. Raises UserError for half of a surrogate pair."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: is not valid Unicode text: {show(value)}") from error
    return value


def finite(value: Any) -> float | None:
    """A number as a float, or None if it is none or not finite."""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def number_hint(value: Any, wanted: Any) -> str:
    """What to write instead, when a number was written as text."""
    number = finite(value) if wanted in (int, float) and isinstance(value, str) else None
    if number is None or (wanted is int and number != int(number)):
        return ""
    is_whole = wanted is int or (number == int(number) and abs(number) < 1e15)
    written = repr(int(number)) if is_whole else repr(number)
    if "e" in written and "." not in written:
        written = written.replace("e", ".0e")  # YAML 1.1 reads 1e-4 as text and 1.0e-4 as a number
    return f"; write {written}, without quotes"


def check_limits(value: Any, limits: Mapping[str, Any], place: str) -> None:
    """Refuses a value outside the limits of its field's declaration."""
    rules: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
        "at_least": (operator.ge, "at least"),
        "above": (operator.gt, "above"),
        "at_most": (operator.le, "at most"),
        "below": (operator.lt, "below"),
    }
    given = [(*rules[name], limits[name]) for name in rules if name in limits]
    if not all(holds(value, limit) for holds, _, limit in given):
        allowed = " and ".join(f"{words} {limit}" for _, words, limit in given)
        raise UserError(f"{place}: must be {allowed}, got {value}")


def nearest(text: str, known: Iterable[str]) -> str:
    """`; the nearest is X`, or nothing if nothing is near."""
    close = difflib.get_close_matches(text, list(known), n=1, cutoff=0.5)
    return f"; the nearest is {close[0]}" if close else ""
