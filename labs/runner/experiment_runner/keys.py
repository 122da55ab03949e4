"""What the person keeps secret: from the environment, and from a file `.env` beside which nothing is ever written.

The account's key is used here and never leaves this machine; the others go to the steps that name them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from experiment_runner.errors import InputError
from experiment_runner.redaction import SECRET_NAMES, Secrets

LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
QUOTED = re.compile(r"""(["'])(.*)\1""")
ENV_FILE = ".env"
SETTINGS = ("RUNPOD_API_URL", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_BASE_URL")
"""What the file may say besides keys."""


def read_env_file(path: Path, warn: Callable[[str], None]) -> dict[str, str]:
    """The variables of a file; empty if there is none. Raises InputError with the number of a line that is wrong, and
    never with what it says."""
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start}: not UTF-8; save the file as UTF-8") from error
    if os.name != "nt" and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        warn(f"{path}: others on this computer can read your keys; chmod 600 {path}")
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None:
            raise InputError(f"{path}:{number}: must be NAME=value (the line is not repeated here: it may hold a key)")
        name, value = match[1], match[2].strip()
        quoted = QUOTED.fullmatch(value)
        values[name] = quoted[2] if quoted else value
        if not values[name].isprintable() or (SECRET_NAMES.search(name) and re.search(r"\s", values[name])):
            raise InputError(f"{path}:{number}: the value of {name} has a space or a character that no key has")
    return values


def find_keys(folder: Path, warn: Callable[[str], None]) -> dict[str, str]:
    """All of it: the environment's values before the file's. Empty values count as none."""
    found = {name: value for name, value in read_env_file(folder / ENV_FILE, warn).items() if value}
    for name, value in os.environ.items():
        if value.strip() and (SECRET_NAMES.search(name) or name in SETTINGS):
            found[name] = value.strip()
    return found


def secrets_of(keys: Mapping[str, str]) -> Secrets:
    """The values among them that must be written nowhere."""
    return Secrets({name: value for name, value in keys.items() if SECRET_NAMES.search(name) and len(value) >= 8})


def missing_keys(names: Iterable[str], keys: Mapping[str, str]) -> list[str]:
    """The names without a value."""
    return [name for name in names if not keys.get(name)]
