"""JSON files with their own hash in them: one byte that is not as it was written, and they are refused."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from experiment_runner.durable import json_text, write_atomically
from training_lab.errors import UserError
from training_lab.identity import identity_of


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Writes an object with its hash, whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, sealed_text(content), aside_suffix=f".{secrets.token_hex(4)}")


def read_sealed(path: Path) -> dict[str, Any]:
    """The object in a sealed file. Raises UserError if a single byte of it is not as it was written."""
    try:
        text = path.read_bytes()
        value = json.loads(text)
        del value["sha256"]
        if sealed_text(value) == text:
            return dict(value)
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"{path}: damaged: not as it was written")


def sealed_text(content: dict[str, Any]) -> bytes:
    return json_text({**content, "sha256": identity_of(content)}).encode("utf-8")
