"""Names for things by what they contain: canonical JSON and SHA-256.

Two values have the same identity exactly when they are equal as JSON, whatever the order of their keys.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """`value` as UTF-8 JSON with sorted keys and no spaces. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def identity_of(value: Any) -> str:
    """The SHA-256 of the canonical JSON of `value`, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_of_bytes(data: bytes) -> str:
    """The SHA-256 of `data`, as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
