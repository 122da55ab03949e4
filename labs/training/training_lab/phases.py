"""The named parts of an update, for whoever watches. Where nobody does they cost nothing and change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


class Phases:
    """`with phases("forward"):` marks a part of an update."""

    def __init__(self) -> None:
        self.watch: Callable[[str], contextlib.AbstractContextManager[Any]] | None = None
        """Makes the mark of one part, while somebody watches."""

    def __call__(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return NOTHING if self.watch is None else self.watch(name)
