"""Files of a dataset on the Hugging Face hub: which there are at a revision, with their hashes, and each of them here.

A file is named by its SHA-256 from before it is fetched until it is parsed. `HF_ENDPOINT`, `HF_TOKEN` and
`HF_HUB_OFFLINE` mean what they mean to the hub's own client, whose cache is looked into first.
"""

from __future__ import annotations

import fnmatch
import http
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any, NamedTuple

from experiment_runner.durable import sha256_of_file
from training_lab.data.download import (
    TIMEOUT_S,
    USER_AGENT,
    bearer,
    broken,
    fetch_file,
    patiently,
    refuse_bad_answer,
)
from training_lab.data.lock import waiting_lock
from training_lab.errors import LabError, UserError
from training_lab.progress import Progress
from training_lab.sealed import read_sealed, write_sealed

COMMIT = re.compile(r"[0-9a-f]{40}")


class HubFile(NamedTuple):
    """A file of a dataset at one commit."""

    repo: str
    commit: str
    name: str
    sha256: str
    bytes: int

    @property
    def url(self) -> str:
        return f"{endpoint()}/datasets/{self.repo}/resolve/{self.commit}/{self.name}"


class Listing(NamedTuple):
    """The files of a dataset at one commit: name to (SHA-256, bytes)."""

    commit: str
    files: dict[str, tuple[str, int]]


def endpoint() -> str:
    """The hub's address. Raises UserError if `HF_ENDPOINT` is none."""
    address = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
        raise UserError(f"HF_ENDPOINT: must be an address such as https://huggingface.co, got {address!r}")
    return address


def is_set(name: str) -> bool:
    """Whether an environment variable says yes, as the hub's own client reads it."""
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def is_offline() -> bool:
    return is_set("HF_HUB_OFFLINE")


def token() -> str | None:
    """The user's token: `HF_TOKEN`, or what `hf auth login` left. None: anonymous. Raises UserError if it is none."""
    if is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    place = Path(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token")
    source, found = "HF_TOKEN", os.environ.get("HF_TOKEN", "").strip()
    if not found:
        source = str(place)
        try:
            found = place.read_text("utf-8", errors="replace").strip()
        except OSError:
            return None
    if not re.fullmatch(r"[!-~]*", found):
        raise UserError(f"{source}: is not a token: it has characters that none has")
    return found or None


def hub_home() -> Path:
    """Where the hub's own client keeps its files."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{caches}/huggingface").expanduser()


def hub_cache() -> Path:
    """Where the hub's own client keeps its downloads."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named).expanduser() if named else hub_home() / "hub"


def list_files(repo: str, revision: str, cache_dir: Path, progress: Progress) -> Listing:
    """The files at a revision, asked for once and kept: a branch or tag stays what it was the first time.

    Raises LabError if the hub must be asked and cannot be.
    """
    name = urllib.parse.quote(revision, safe="")
    kept = cache_dir / "hub" / repo / f"{name}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with waiting_lock(kept.with_suffix(".lock"), f"Another process asks the hub for {revision}", progress):
            if not kept.exists():
                url = f"{endpoint()}/api/datasets/{repo}/revision/{name}?blobs=true"
                listing = read_listing(ask(url, progress), url)
                if COMMIT.fullmatch(revision) and listing.commit != revision:
                    raise LabError(f"{url}: the hub answers with commit {listing.commit}; not used")
                write_sealed(kept, listing._asdict())
    try:
        said = read_sealed(kept)
    except UserError as error:
        raise UserError(f"{error}; delete it to ask the hub again") from error
    return Listing(said["commit"], {name: (sha256, size) for name, (sha256, size) in said["files"].items()})


def ask(url: str, progress: Progress) -> Any:
    """The JSON at a URL, with patience for failures that may pass."""
    import requests

    if is_offline():
        raise LabError(f"{url}: must be asked, but HF_HUB_OFFLINE is set; unset it once")

    def attempt() -> Any:
        headers = {"User-Agent": USER_AGENT}
        try:
            with requests.get(url, headers=headers, auth=bearer(token()), timeout=TIMEOUT_S) as answer:
                if answer.status_code == http.HTTPStatus.NOT_FOUND:
                    reason = answer.headers.get("X-Error-Code", "not found")
                    raise UserError(f"{url}: {reason}: there is no such dataset or revision")
                refuse_bad_answer(answer, url)
                return answer.json()
        except requests.JSONDecodeError as error:
            raise LabError(f"{url}: not the answer of a hub: no JSON but {answer.text[:40]!r}") from error
        except requests.RequestException as error:
            raise broken(error, url) from error

    return patiently(attempt, lambda: 0, url, progress)


def read_listing(answer: Any, url: str) -> Listing:
    """The commit and the large files of an answer of the hub."""
    try:
        commit = str(answer["sha"])
        large = [one for one in answer["siblings"] if one.get("lfs")]
        files = {one["rfilename"]: (str(one["lfs"]["sha256"]), int(one["lfs"]["size"])) for one in large}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LabError(f"{url}: not the answer of a hub: {error!r}") from error
    if not all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256, _ in files.values()):
        raise LabError(f"{url}: not the answer of a hub: what it says of a file is no SHA-256")
    if not COMMIT.fullmatch(commit):
        raise LabError(f"{url}: not the answer of a hub: its commit is {commit!r}")
    return Listing(commit, files)


def local_path(file: HubFile, cache_dir: Path) -> Path:
    """Where the lab keeps a file; the folder is its hash."""
    return cache_dir / "downloads" / file.sha256 / Path(file.name).name


def find(file: HubFile, cache_dir: Path) -> Path | None:
    """The verified file, from the lab's downloads or from the cache of the hub's client; None if it is in neither.

    Raises UserError if the lab's own is damaged.
    """
    path = local_path(file, cache_dir)
    if path.exists():
        check_hash(path, file.sha256, "delete it to download it again")
        return path
    blob = hub_cache() / f"datasets--{file.repo.replace('/', '--')}" / "blobs" / file.sha256
    try:  # that client does not look at what it stores
        return blob if blob.is_file() and sha256_of_file(blob) == file.sha256 else None
    except OSError:
        return None


def find_or_fetch(file: HubFile, cache_dir: Path, progress: Progress) -> Path:
    """The verified file, downloaded if need be. Raises LabError if it cannot be had."""
    found, path = find(file, cache_dir), local_path(file, cache_dir)
    if found is not None:
        return found
    if is_offline():
        raise LabError(f"{file.url}: is not here, and HF_HUB_OFFLINE is set; unset it once, or put the file at {path}")
    fetch_file(file.url, file.sha256, file.bytes, path, token(), progress)
    return path


def check_hash(path: Path, sha256: str, advice: str) -> None:
    """Raises UserError unless a file has a hash."""
    got = sha256_of_file(path)
    if got != sha256:
        raise UserError(f"{path}: damaged: its SHA-256 is {got[:12]}…, not {sha256[:12]}…; {advice}")


def chosen_files(listing: Listing, patterns: tuple[str, ...], suffix: str) -> list[str]:
    """The names that the patterns stand for, sorted; one without its folder will do where it is the only one.

    Raises UserError for a pattern that stands for no file.
    """
    found: set[str] = set()
    for pattern in patterns:
        names = {name for name in listing.files if fnmatch.fnmatchcase(name, pattern) and name.endswith(suffix)}
        if not names:
            names = {name for name in listing.files if Path(name).name == pattern}
            if len(names) > 1:
                raise UserError(
                    f"data.fineweb_files: {pattern}: stands for {len(names)} files: {', '.join(sorted(names)[:3])}, …; "
                    "write the folder, too"
                )
        if not names:
            some = ", ".join(sorted(listing.files)[:3])
            raise UserError(
                f"data.fineweb_files: {pattern}: no such file is known at {listing.commit[:12]}…; known are {some}, …"
            )
        found |= names
    return sorted(found)
