"""How long a machine waits for whoever fetches its results, before it stops itself."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from experiment_runner.agent import files, place, steps

AN_HOUR_AGO = time.time() - 3600
SPEC: dict[str, Any] = {"collect_grace": 0.6, "guard": {"argument": "https://nowhere"}}


class StoppedItself(Exception):
    """Instead of the request that ends the machine."""


@pytest.fixture
def lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of signs of life; the last one is an hour old."""
    path = tmp_path / "lease"
    path.touch()
    os.utime(path, (AN_HOUR_AGO, AN_HOUR_AGO))
    monkeypatch.setattr(place, "LEASE", path)
    monkeypatch.setattr(steps, "LEASE", path)

    def stop(*words: Any, **options: Any) -> None:
        raise StoppedItself

    monkeypatch.setattr("subprocess.run", stop)
    return path


def seconds_until_it_stops() -> float:
    began = time.monotonic()
    with pytest.raises(StoppedItself):
        steps.wait_for_collection(SPEC)
    return time.monotonic() - began


@pytest.mark.usefixtures("lease")
def test_the_time_begins_at_the_end_of_the_job_and_not_with_who_left_before() -> None:
    assert seconds_until_it_stops() >= 0.6


def test_each_sign_of_life_gives_all_of_the_time_again(lease: Path) -> None:
    def come() -> None:
        for _ in range(4):
            time.sleep(0.3)
            lease.touch()

    thread = threading.Thread(target=come)
    thread.start()
    seconds = seconds_until_it_stops()
    thread.join()
    assert seconds >= 4 * 0.3 + 0.5


def test_who_waits_for_a_file_to_be_hashed_is_there(lease: Path, tmp_path: Path) -> None:
    (tmp_path / "result").write_bytes(b"x" * 100)
    assert files.describe(tmp_path / "result") is not None
    assert time.time() - lease.stat().st_mtime < 60
