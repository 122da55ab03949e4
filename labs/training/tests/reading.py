"""Files as a person writes them, and what the lab reads from them."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny import tiny

from training_lab.config_data import DataConfig
from training_lab.data.build import BuildOptions, Part, accepted, find_or_build
from training_lab.data.cache import TokenCache
from training_lab.data.sources import Source, find_source
from training_lab.errors import UserError
from training_lab.progress import NoProgress

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


class Read(NamedTuple):
    """What was read of a source."""

    documents: list[tuple[str, str]]
    """Names and texts."""
    rejected: list[tuple[str, str]]
    """Names and reasons."""
    files: list[dict[str, Any]]
    """The files in the manifest."""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.documents]

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.documents]

    @property
    def file_names(self) -> list[str]:
        return [file["name"] for file in self.files]


def write(name: str, content: str | bytes) -> Path:
    """A file with its folders; text as UTF-8 with its line ends as they are."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def compressed(content: bytes, suffix: str) -> bytes:
    """Content as it is in a file with this suffix: `.gz`, `.zst` or none."""
    if suffix == ".gz":
        return gzip.compress(content)
    if suffix == ".zst":  # with a checksum, as the program zstd writes it
        return zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: 1})
    return content


def files_config(*paths: str, **settings: Any) -> DataConfig:
    """The source `files` with some paths; `settings` are other values of `data`."""
    overrides = [f"data.{name}={json.dumps(value)}" for name, value in settings.items()]
    return tiny("data.source=files", f"data.paths={json.dumps(paths)}", *overrides).data


def source_of(*paths: str, **settings: Any) -> Source:
    """The source `files` with its files found and hashed, none of them read yet."""
    return find_source(files_config(*paths, **settings), NoProgress())


def read(source: Source) -> Read:
    """Everything that a source gives."""
    documents: list[tuple[str, str]] = []
    rejected: list[tuple[str, str]] = []
    for part in accepted(source, 0):
        if isinstance(part, Part):
            documents.append((source.document_name(part.file, part.document.number), part.document.text))
        else:
            rejected.append(part)
    return Read(documents, rejected, [file.entry() for file in source.files])


def read_files(*paths: str, **settings: Any) -> Read:
    """What the source `files` makes of some paths."""
    return read(source_of(*paths, **settings))


def tokenise_files(*paths: str, **settings: Any) -> TokenCache:
    """The token cache of some paths."""
    config = files_config(*paths, **settings)
    return find_or_build(find_source(config, NoProgress()), config, NoProgress(), BuildOptions(workers=1))


def refusal(*paths: str, **settings: Any) -> str:
    """The one line with which some paths are refused."""
    with pytest.raises(UserError) as caught:
        read_files(*paths, **settings)
    return line_of(caught.value)


def refusal_to_read(source: Source) -> str:
    """The one line with which a source is refused whose files were found."""
    with pytest.raises(UserError) as caught:
        read(source)
    return line_of(caught.value)


def line_of(error: UserError) -> str:
    """The message of an error that a person reads as one line, and that exits with 2."""
    message = str(error)
    assert error.exit_code == 2
    assert len(message.splitlines()) == 1, message
    return message


def left_in_cache() -> list[str]:
    """What an ended build left in the cache folder, but for lock files."""
    return [path.as_posix() for path in Path(".cache").rglob("*") if path.is_file() and path.suffix != ".lock"] + [
        path.as_posix() for path in Path(".cache/tokens").glob("*") if path.is_dir()
    ]
