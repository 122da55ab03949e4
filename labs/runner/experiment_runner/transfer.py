"""Results home: resumed wherever the connection broke, verified by size and SHA-256, and put in place only then.

Files arrive in a folder beside the output. A byte that is there is never asked for again, unless the file turns out to
be another: that is also how files which grow are fetched while the job still runs. Nothing that the target says can
make this write outside the output.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from experiment_runner.durable import sha256_of_file
from experiment_runner.errors import RunnerError
from experiment_runner.job import Results
from experiment_runner.session import LOOK_S, ConnectionLost, Output
from experiment_runner.target import Target

GB = 1_000_000_000
SPARE_BYTES = 100_000_000
"""Of the disk here, kept free."""
TRIES = 6
"""A connection may break so often in a row without a single new byte."""
ROUNDS = 3
"""A file that arrives with another hash, because it still changed, is fetched so often."""
FEW_FILES = 2000
"""So many are asked for at a time."""
BAD_PARTS = ("", ".", "..")

Show = Callable[[int, int], None]


class TransferFailed(RunnerError):
    """The results are not all here; those that are verified stay."""


class Pulled(NamedTuple):
    """What came home."""

    files: dict[str, dict[str, Any]]
    """Size and SHA-256 of each file, verified."""
    skipped: dict[str, str]
    """What did not come, with the reason."""
    missing: list[str]
    """Files that were required, and do not exist."""

    def describe(self) -> dict[str, Any]:
        """What the record says of it."""
        total = sum(entry["bytes"] for entry in self.files.values())
        return {"num_files": len(self.files), "bytes": total, **self._asdict()}


def incoming_of(output: Path) -> Path:
    """Where files arrive."""
    return output.with_name(f".{output.name}.incoming")


def pull(target: Target, output: Path, results: Results, pause_s: float, show: Show) -> Pulled:
    """Fetches every result into `output`.

    Raises TransferFailed if something that should be here is not, ConnectionLost if the target stays unreachable.
    """
    skipped: dict[str, str] = {}
    for _ in range(ROUNDS):
        listing = with_patience(target, target.manifest, pause_s)
        expected, refused = safe_files(listing["files"])
        skipped = {**listing["skipped"], **refused}
        need_room(output, expected, results)
        wanted = {path: entry for path, entry in expected.items() if not is_here(output / path, entry)}
        first_of = {str(entry["sha256"]): path for path, entry in sorted(wanted.items(), reverse=True)}
        changed = fetch(target, output, {path: wanted[path] for path in first_of.values()}, pause_s, show)
        for path in wanted.keys() - set(first_of.values()):  # the same content under another name comes once
            copy_within(output, first_of[str(wanted[path]["sha256"])], path)
        skipped.update(changed)
        if not changed:
            break
    missing = [name for name in results.required if name not in expected]
    wrong = sorted(path for path, entry in expected.items() if not is_here(output / path, entry, by_size=True))
    if wrong:
        reasons = "; ".join(f"{path} ({skipped.get(path, 'it is not what was listed')})" for path in wrong[:3])
        raise TransferFailed(f"{len(wrong)} of {len(expected)} results did not arrive as they are there: {reasons}")
    shutil.rmtree(incoming_of(output), ignore_errors=True)
    if hasattr(os, "sync"):
        os.sync()
    return Pulled(expected, skipped, missing)


def safe_files(listed: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The files of a listing that may be written below a folder, and the others with the reason."""
    safe, refused = {}, {}
    for path, entry in listed.items():
        if not is_safe(path):
            refused[path] = "its name leads out of the results"
        elif not (isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and "sha256" in entry):
            refused[path] = "it is not described"
        else:
            safe[path] = {"bytes": entry["bytes"], "sha256": entry["sha256"]}
    return safe, refused


def is_safe(path: str) -> bool:
    """Whether a path stays below the folder that it is relative to, on any system."""
    parts = path.split("/")
    return (
        not any(part in BAD_PARTS for part in parts) and "\\" not in path and ":" not in parts[0] and "\0" not in path
    )


def need_room(output: Path, expected: Mapping[str, Any], results: Results) -> None:
    """Raises TransferFailed if there is more than is allowed, or than fits here."""
    total = sum(entry["bytes"] for entry in expected.values())
    if total > results.max_gb * GB:
        raise TransferFailed(
            f"the results have {total / GB:.2f} GB, which exceeds results.max_gb = {results.max_gb:g}; nothing was "
            "fetched"
        )
    here = existing(output.parent)
    free = shutil.disk_usage(here).free
    if total + SPARE_BYTES > free:
        raise TransferFailed(
            f"{here}: the results have {total / GB:.2f} GB, and {free / GB:.2f} GB are free; make room, then `collect`"
        )


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return folder if folder.exists() else existing(folder.parent)


def is_here(path: Path, entry: Mapping[str, Any], by_size: bool = False) -> bool:
    """Whether a file is the one that an entry describes; no link counts as one."""
    try:
        is_right = not path.is_symlink() and path.is_file() and path.stat().st_size == entry["bytes"]
    except OSError:
        return False
    return is_right and (by_size or sha256_of_file(path) == entry["sha256"])


def fetch(
    target: Target, output: Path, wanted: Mapping[str, dict[str, Any]], pause_s: float, show: Show
) -> dict[str, str]:
    """Fetches files and puts those that verify in place. Returns the others with the reason."""
    incoming, left, failed = incoming_of(output), dict(wanted), {}
    total = sum(int(entry["bytes"]) for entry in wanted.values())
    tries, most = 0, -1

    def done() -> int:
        arrived = sum(min(int(entry["bytes"]), size_of(incoming / path)) for path, entry in left.items())
        return total - sum(int(entry["bytes"]) for entry in left.values()) + arrived

    while left:
        tries, most = (0, done()) if done() > most else (tries + 1, most)
        batch = [[path, size_of(incoming / path)] for path in sorted(left)[:FEW_FILES]]
        try:
            with target.session.stream(target.command("read"), json.dumps(batch).encode()) as output_of:
                for path, problem in read_frames(output_of, incoming, left, Shown(show, done(), total)):
                    problem = problem or settle(incoming / path, output, path, left[path])
                    if problem:
                        failed[path] = problem
                    del left[path]
        except ConnectionLost:
            if tries >= TRIES:
                raise
            wait(target, pause_s * min(tries + 1, 6))
    return failed


class Shown:
    """How far a transfer is."""

    def __init__(self, show: Show, done: int, total: int) -> None:
        self.show, self.done, self.total = show, done, total

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        self.show(self.done, self.total)


def read_frames(
    output: Output, incoming: Path, asked: Container[str] | None, shown: Shown
) -> Iterator[tuple[str, str]]:
    """Reads frames into the folder of what arrives: yields each file when its frame is whole, with the problem if there
    was one. `asked` are the paths that may come; None: any that is safe."""
    while True:
        line = output.line()
        if not line:
            return
        frame = json.loads(line)
        path = frame["path"]
        if path not in asked if asked is not None else not is_safe(path):
            raise TransferFailed(f"the target sent {path!r}, which nobody asked for")
        if "error" in frame:
            yield path, frame["error"]
            continue
        left = int(frame["bytes"])
        with open_part(incoming, path) as file:
            while left:
                piece = output.some(left)
                if not piece:
                    raise ConnectionLost("the connection ended within a file")
                file.write(piece)
                left -= len(piece)
                shown.add(len(piece))
        yield path, ""


def wait(target: Target, seconds: float) -> None:
    """Sleeps, unless the person wants to stop."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        target.session.look()
        time.sleep(min(LOOK_S, seconds))


def open_part(incoming: Path, path: str) -> Any:
    """A file that is arriving, at its end."""
    part = incoming.joinpath(*PurePosixPath(path).parts)
    part.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return open(part, "ab")


def size_of(path: Path) -> int:
    """A file's size; 0 if there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def settle(part: Path, output: Path, path: str, entry: Mapping[str, Any]) -> str:
    """Puts a file that arrived in its place if it verifies; the reason if not, and it begins anew."""
    if not is_here(part, entry):
        with contextlib.suppress(OSError):
            part.unlink()
        return "arrived with another size or hash: it changed while it was fetched"
    place = output.joinpath(*PurePosixPath(path).parts)
    make_folders(output, place.parent)
    os.replace(part, place)
    return ""


def copy_within(output: Path, source: str, path: str) -> None:
    """A file of the output under another name too, if it is there."""
    if (output / source).is_file():
        make_folders(output, (output / path).parent)
        shutil.copyfile(output / source, output / path)


def make_folders(output: Path, folder: Path) -> None:
    """Makes the folders down to one inside the output, none of them through a link."""
    output.mkdir(parents=True, exist_ok=True)
    current = output
    for part in folder.relative_to(output).parts:
        current = current / part
        if current.is_symlink():
            raise TransferFailed(f"{current}: is a symbolic link, and results are not written through links")
        current.mkdir(exist_ok=True)


def follow_live(target: Target, output: Path) -> None:
    """Fetches what the live files have grown by. What arrives is not verified before the job has ended."""
    incoming = incoming_of(output)
    known = {path.relative_to(incoming).as_posix(): size_of(path) for path in incoming.rglob("*") if path.is_file()}
    with target.session.stream(target.command("live"), json.dumps(known).encode()) as output_of:
        for path, problem in read_frames(output_of, incoming, None, Shown(lambda done, total: None, 0, 0)):
            if problem:
                raise TransferFailed(f"{path}: {problem}")


def salvage(output: Path) -> dict[str, dict[str, Any]]:
    """Puts what arrived without ever being verified beside the rest, where the machine is gone. Returns it."""
    incoming, saved = incoming_of(output), {}
    for part in sorted(path for path in incoming.rglob("*") if path.is_file()):
        path = part.relative_to(incoming).as_posix()
        make_folders(output, (output / path).parent)
        if not (output / path).exists():
            os.replace(part, output / path)
            saved[path] = {"bytes": size_of(output / path), "sha256": sha256_of_file(output / path)}
    shutil.rmtree(incoming, ignore_errors=True)
    return saved


def with_patience(target: Target, action: Callable[[], Any], pause_s: float) -> Any:
    """Does something again over a connection that breaks."""
    for attempt in range(TRIES):
        try:
            return action()
        except ConnectionLost:
            if attempt + 1 == TRIES:
                raise
            wait(target, pause_s * (attempt + 1))
    raise AssertionError
