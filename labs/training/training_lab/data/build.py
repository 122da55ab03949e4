"""Building a token cache: in fixed blocks, by any number of workers, from wherever an earlier process was killed.

One thread reads documents and cuts them into blocks by a rule that knows nothing of workers; workers tokenise blocks;
what they made is appended in order, and a line in a journal says so. A killed build leaves a hidden folder behind,
whose good blocks the next one keeps; the finished folder is renamed to its place. So the bytes of a cache depend on
nothing but what it is made from.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiment_runner.durable import sha256_of_file, sync_file, sync_folder
from training_lab.config_data import DataConfig
from training_lab.data.cache import (
    CACHE_MANIFEST,
    DOCUMENT,
    DOCUMENTS,
    SCHEMA,
    TOKENS,
    TokenCache,
    open_cache,
    token_dtype,
)
from training_lab.data.documents import Document, Rejected, changed, format_of
from training_lab.data.journal import Tally, journal_line, resume
from training_lab.data.lock import waiting_lock
from training_lab.data.parquet import num_rows
from training_lab.data.sources import Source, cache_path
from training_lab.data.split import content_hash
from training_lab.data.tokenizers import CharTokenizer, FastGpt2Tokenizer, Tokenizer, fingerprint, make_tokenizer
from training_lab.errors import LabError, UserError
from training_lab.identity import identity_of
from training_lab.progress import Progress
from training_lab.provenance import usable_cpus
from training_lab.sealed import read_sealed, write_sealed

BLOCK_DOCUMENTS = 1024
BLOCK_CHARACTERS = 2 << 20
"""A block is full with so many documents, or so many characters: some tenths of a second of one worker's time."""
BLOCK_RULE = [BLOCK_DOCUMENTS, BLOCK_CHARACTERS]
JOURNAL = "journal.jsonl"
MOST_EXAMPLES = 10
MOST_WORKERS = 16
"""Unless the user says otherwise: beyond it, reading is what takes the time."""
HASHED_TOKENS = 1 << 20


class Part(NamedTuple):
    """One document of a block."""

    file: int
    document: Document


@dataclass
class Block:
    """Documents that are tokenised together."""

    parts: list[Part] = field(default_factory=list)
    rejected: list[tuple[int, str, str]] = field(default_factory=list)
    """Documents that were left out: how many parts come before each, its name, and why."""


@dataclass
class Encoded:
    """What a worker made of a block."""

    tokens: list[np.ndarray]
    rows: np.ndarray
    rejected: list[tuple[int, str, str]]
    text_bytes: list[int]
    token_counts: list[int | None]


def cache_identity(source: Source, config: DataConfig) -> dict[str, Any]:
    """All that decides the bytes of a cache. Its hash is the cache's name."""
    return {
        "schema": SCHEMA,
        "source": config.source,
        "files": [file.entry() for file in source.files],
        "generated": source.generated,
        "reading": source.reading._asdict(),
        "limits": {"documents": config.max_documents, "tokens": config.max_tokens},
        "tokenizer": fingerprint(config.tokenizer),
    }


class BuildOptions(NamedTuple):
    """How a cache is built; what it becomes depends on none of this."""

    workers: int = 0
    """Threads that tokenise; 0: one a CPU."""
    is_fast: bool = False
    """Whether an optional, faster tokenizer makes the tokens, checked against the usual one."""
    may_build: bool = True
    """Whether a cache that is not there is built; otherwise that is an error."""


def find_or_build(source: Source, config: DataConfig, progress: Progress, options: BuildOptions) -> TokenCache:
    """The cache of a source, opened and verified; built first if there is none.

    Raises UserError for text that cannot be used, and if nothing is left of it; then no folder stays behind.
    """
    made_from = cache_identity(source, config)
    identity = identity_of(made_from)
    folder = cache_path(config) / "tokens" / identity[:16]
    if not folder.exists() and not options.may_build:
        raise UserError(
            f"{folder}: there is no token cache of these files as they are now: they have changed since, or were never "
            "prepared; `data prepare` makes it"
        )
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with waiting_lock(folder.with_name(f".{folder.name}.lock"), "Another process tokenises this", progress):
                if not folder.exists():
                    build(folder, source, config, made_from, progress, options)
        except OSError as error:
            raise UserError(
                f"{error.filename or folder}: cannot be written: {error.strerror}; free some space, or choose another "
                "data.cache_dir"
            ) from error
    progress.show("Verifying the token cache", 0, None, "")
    cache = open_cache(folder)
    if cache.manifest["made_from"] != made_from:
        raise UserError(f"{folder}: holds other data than its name says; delete the folder to make it again")
    return cache


def build(
    folder: Path,
    source: Source,
    config: DataConfig,
    made_from: dict[str, Any],
    progress: Progress,
    options: BuildOptions,
) -> None:
    """Makes a cache aside and renames it to `folder`. A process that is killed, or loses its source, leaves its good
    blocks to the next."""
    aside = folder.with_name(f".building-{folder.name}")
    try:
        aside.mkdir(exist_ok=True)
        tokenizer = FastGpt2Tokenizer() if options.is_fast else find_tokenizer(source, config, aside)
        workers = options.workers or min(usable_cpus(), MOST_WORKERS)
        tally = append_blocks(aside, source, config, tokenizer, progress, workers)
        check_written(aside, tally, tokenizer)
        if tally.is_full or config.max_documents:
            check_unchanged(source)
        refuse_nothing(tally, config)
        try:
            write_sealed(aside / CACHE_MANIFEST, cache_manifest(aside, tally, tokenizer, made_from))
        except LabError as error:
            raise UserError(str(error)) from error
        for path in aside.iterdir():
            if path.name not in (TOKENS, DOCUMENTS, CACHE_MANIFEST):
                path.unlink()
        os.rename(aside, folder)
        sync_folder(folder.parent)
    except (UserError, OSError):  # other text is another cache, and a full disk wants its space back
        shutil.rmtree(aside, ignore_errors=True)
        raise


def refuse_nothing(tally: Tally, config: DataConfig) -> None:
    """Raises UserError if no document is left, with the reason."""
    if not tally.documents and tally.is_full:
        raise UserError(f"data.max_tokens: {config.max_tokens} is less than the first document has; raise it")
    if not tally.documents:
        why = ", ".join(f"{number:,} {reason}" for reason, number in tally.rejected.items()) or "there is none"
        raise UserError(f"data: the source {config.source} gives no document ({why}); give text")


def cache_manifest(aside: Path, tally: Tally, tokenizer: Tokenizer, made_from: dict[str, Any]) -> dict[str, Any]:
    """What a cache says of itself."""
    return {
        "made_from": made_from,
        "tokenizer": tokenizer.manifest(),
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "documents": tally.documents,
        "tokens": tally.tokens,
        "text_bytes": tally.text_bytes,
        "rejected": {"counts": tally.rejected, "examples": tally.rejected_examples},
        "token_count_column": {
            "checked": tally.counts_checked,
            "mismatches": tally.counts_wrong,
            "examples": tally.counts_examples,
        },
        "files": {
            name: {"bytes": (aside / name).stat().st_size, "sha256": sha256_of_file(aside / name)}
            for name in (TOKENS, DOCUMENTS)
        },
    }


def check_written(aside: Path, tally: Tally, tokenizer: Tokenizer) -> None:
    """Raises LabError if somebody else wrote to the same build, which locks prevent where there are any."""
    width = token_dtype(tokenizer.vocab_size).itemsize
    for name, size in ((TOKENS, tally.tokens * width), (DOCUMENTS, tally.documents * DOCUMENT.itemsize)):
        found = (aside / name).stat().st_size
        if found != size:
            raise LabError(
                f"{aside / name}: has {found:,} bytes, not {size:,}: another process seems to build there, on a file "
                "system without locks; build it once, alone"
            )


def check_unchanged(source: Source) -> None:
    """Raises UserError if a file changed since it was hashed: one that is not read to its end proves nothing itself."""
    for file in source.files:
        path = file.find()
        if path is not None and sha256_of_file(path) != file.sha256:
            raise changed(path)


def find_tokenizer(source: Source, config: DataConfig, aside: Path) -> Tokenizer:
    """The configured tokenizer. `char` needs to have seen all text first, and keeps what it saw for a next process."""
    if config.tokenizer != "char":
        return make_tokenizer(config.tokenizer)
    kept = aside / "characters.json"
    with contextlib.suppress(UserError):
        return CharTokenizer(read_sealed(kept)["characters"])
    parts = accepted(source, config.max_documents)
    tokenizer = CharTokenizer.of_texts(part.document.text for part in parts if isinstance(part, Part))
    write_sealed(kept, {"characters": tokenizer.characters})
    return tokenizer


def accepted(source: Source, max_documents: int) -> Iterator[Part | tuple[str, str]]:
    """The documents that hold any text, at most so many (0: all); between them those left out: name and reason."""
    count = 0
    for file, document in source.documents():
        if isinstance(document, Rejected):
            yield source.document_name(file, document.number), document.reason
        elif not document.text or document.text.isspace():
            yield source.document_name(file, document.number), "white space" if document.text else "empty"
        else:
            yield Part(file, document)
            count += 1
            if count == max_documents:
                return


def blocks_of(parts: Iterable[Part | tuple[str, str]]) -> Iterator[Block]:
    """Documents in blocks whose borders depend on the documents alone."""
    block, characters = Block(), 0
    for part in parts:
        if not isinstance(part, Part):
            block.rejected.append((len(block.parts), *part))
            continue
        block.parts.append(part)
        characters += len(part.document.text)
        if len(block.parts) == BLOCK_DOCUMENTS or characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = Block(), 0
    if block.parts or block.rejected:
        yield block


def encode_block(block: Block | LabError, source: Source, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Encoded:
    """Tokenises and hashes the documents of a block. Raises what ended the reading."""
    if isinstance(block, LabError):
        raise block
    texts = [part.document.text for part in block.parts]
    try:
        encoded = tokenizer.encode(texts)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what Rust raises; no Exception to Python
            raise
        first = source.document_name(block.parts[0].file, block.parts[0].document.number)
        raise LabError(f"the tokenizer fails on one of the {len(texts)} documents from {first} on: {error}") from None
    contents = b"".join(content_hash(text) for text in texts)
    digests = b"".join(token_hash(ids) for ids in encoded)
    rows = np.zeros(len(texts), dtype=DOCUMENT)
    rows["tokens"] = [len(ids) for ids in encoded]
    rows["content"] = np.frombuffer(contents, dtype=np.uint8).reshape(-1, 32)
    rows["sha256"] = np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32)
    rows["file"] = [part.file for part in block.parts]
    rows["number"] = [part.document.number for part in block.parts]
    tokens = [ids.astype(dtype) for ids in encoded]
    sizes = [len(text.encode("utf-8")) for text in texts]
    counts = [part.document.token_count for part in block.parts]
    return Encoded(tokens, rows, block.rejected, sizes, counts)


def token_hash(tokens: np.ndarray) -> bytes:
    """SHA-256 of token ids as uint32, little-endian; in slices, because one document may be very long."""
    digest = hashlib.sha256()
    for begin in range(0, len(tokens), HASHED_TOKENS):
        digest.update(tokens[begin : begin + HASHED_TOKENS].astype("<u4").tobytes())
    return digest.digest()


def append_blocks(
    aside: Path, source: Source, config: DataConfig, tokenizer: Tokenizer, progress: Progress, workers: int
) -> Tally:
    """Brings the files of a build to their end, from the last good block on."""
    dtype = token_dtype(tokenizer.vocab_size)
    total = size_of_work(source, config)
    with (
        open(aside / TOKENS, "a+b") as tokens,
        open(aside / DOCUMENTS, "a+b") as documents,
        open(aside / JOURNAL, "a+b") as journal,
    ):
        num_done, tally = resume((tokens, documents), journal, BLOCK_RULE)
        began, bytes_before = time.monotonic(), tally.text_bytes
        blocks = blocks_of(accepted(source, config.max_documents))
        for _ in range(num_done):
            next(blocks)
        for encoded in in_order(blocks, source, tokenizer, dtype, workers) if not tally.is_full else ():
            cut_to_limit(encoded, tally, config.max_tokens)
            add_to_tally(encoded, tally, source, config.tokenizer == "gpt2")
            content = (b"".join(ids.tobytes() for ids in encoded.tokens), encoded.rows.tobytes())
            for file, data in zip((tokens, documents), content, strict=True):
                file.write(data)
                file.flush()
            journal.write(journal_line(content, tally, BLOCK_RULE))
            journal.flush()
            speed = (tally.text_bytes - bytes_before) / max(time.monotonic() - began, 1e-3)
            figures = f"{tally.documents:,} documents, {tally.tokens:,} tokens, {speed / 1e6:,.1f} MB/s"
            done = {"tokens": tally.tokens, "documents": tally.documents, "bytes": tally.text_bytes}
            progress.show("Tokenising", done[total.unit], total.size, figures)
            if tally.is_full:
                break
        for file in (tokens, documents):
            sync_file(file)
    return tally


class Work(NamedTuple):
    """How much there is to do, in the unit in which it is known beforehand; None if it is known in none."""

    unit: str
    size: int | None


def size_of_work(source: Source, config: DataConfig) -> Work:
    """What the progress is measured against."""
    if config.max_tokens:
        return Work("tokens", config.max_tokens)
    if config.max_documents or source.generated:
        return Work("documents", config.max_documents or source.generated)
    formats = [format_of(file.name) for file in source.files]
    if all(one.kind == ".parquet" for one in formats):
        return Work("documents", sum(num_rows(file.locate()) for file in source.files))
    is_plain = not any(one.compression or one.kind == ".parquet" for one in formats)
    return Work("bytes", sum(file.bytes for file in source.files) if is_plain else None)


def in_order(
    blocks: Iterator[Block], source: Source, tokenizer: Tokenizer, dtype: np.dtype[Any], workers: int
) -> Iterator[Encoded]:
    """Blocks, tokenised by `workers` threads (the tokenizer leaves Python's lock), in their order. Never more than
    two blocks more than workers are in memory."""
    waiting: collections.deque[Future[Encoded]] = collections.deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for block in in_turn(blocks):
                waiting.append(pool.submit(encode_block, block, source, tokenizer, dtype))
                if len(waiting) == workers + 2:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def in_turn(blocks: Iterator[Block]) -> Iterator[Block | LabError]:
    """The blocks, then what ended the reading: however far ahead it was met, it counts after the blocks before it."""
    try:
        yield from blocks
    except LabError as error:
        yield error


def cut_to_limit(encoded: Encoded, tally: Tally, max_tokens: int) -> None:
    """Takes the documents from the first on that would exceed the limit (0: none) out of `encoded`, and says in
    `tally` that it is reached."""
    if not max_tokens:
        return
    fits = tally.tokens + np.cumsum(encoded.rows["tokens"].astype(np.int64)) <= max_tokens
    keep = len(fits) if fits.all() else int(np.argmin(fits))
    if keep < len(fits):
        tally.is_full = True
        for name in ("tokens", "rows", "text_bytes", "token_counts"):
            setattr(encoded, name, getattr(encoded, name)[:keep])
        encoded.rejected = [one for one in encoded.rejected if one[0] <= keep]


def add_to_tally(encoded: Encoded, tally: Tally, source: Source, is_gpt2: bool) -> None:
    """Adds a block to the tally."""
    tally.documents += len(encoded.rows)
    tally.tokens += int(encoded.rows["tokens"].sum())
    tally.text_bytes += sum(encoded.text_bytes)
    for _, name, reason in encoded.rejected:
        tally.rejected[reason] = tally.rejected.get(reason, 0) + 1
        if len(tally.rejected_examples) < MOST_EXAMPLES:
            tally.rejected_examples.append([name, reason])
    if not is_gpt2:
        return
    for row, said in zip(encoded.rows, encoded.token_counts, strict=True):
        if said is None:
            continue
        tally.counts_checked += 1
        if said != row["tokens"]:
            tally.counts_wrong += 1
            if len(tally.counts_examples) < MOST_EXAMPLES:
                name = source.document_name(int(row["file"]), int(row["number"]))
                tally.counts_examples.append({"document": name, "says": said, "has": int(row["tokens"])})
