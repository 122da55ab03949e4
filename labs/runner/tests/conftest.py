"""What the tests of the runner share: a lab in an empty folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakepod import SSHD
from lab import Lab, running_lab


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    if SSHD is None:
        pytest.skip("needs OpenSSH's server: apt-get install openssh-server")
    with running_lab(tmp_path / "here", monkeypatch) as made:
        yield made
