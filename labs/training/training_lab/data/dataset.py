"""Everything that a run reads: the batches of its updates, its fixed validation set, and the manifest of both."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training_lab.config import Config, EvalConfig
from training_lab.data.batches import UpdateData, make_batch, make_update_data
from training_lab.data.build import BuildOptions, find_or_build
from training_lab.data.cache import TokenCache
from training_lab.data.layout import MOST_PLANNED, Layout, Pieces, make_layout, plan_identity
from training_lab.data.sources import Source, cache_path, find_source
from training_lab.data.split import SPLIT_RULE
from training_lab.data.stats import MOST_UPDATES, STATS_SCHEMA, data_stats
from training_lab.data.stream import Streams, TokenStream, split_cache
from training_lab.data.tokenizers import Tokenizer
from training_lab.errors import LabError, UserError
from training_lab.identity import identity_of, sha256_of_bytes
from training_lab.progress import NoProgress, Progress
from training_lab.sealed import read_sealed, write_sealed

STATS = "data-stats.json"


@dataclass(frozen=True)
class ValidationSet:
    """Fixed pieces of held-back text. Losses are comparable exactly when the identities are the same."""

    stream: TokenStream
    pieces: Pieces
    identity: str

    @property
    def num_target_tokens(self) -> int:
        return int(self.pieces.num_targets.sum())

    def describe_text(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What the set is, whatever its tokens: the bytes of text that have a label, for losses in bits a byte, which
        mean the same for other tokenizers if the texts have the same hash."""
        end = self.stream.end_of_text.token if self.stream.end_of_text.size else None
        spans = [np.arange(s, s + n + 1) for s, n in zip(self.pieces.starts, self.pieces.num_targets, strict=True)]
        targets = self.stream.take(np.concatenate([span[1:] for span in spans])).tolist()
        covered = self.stream.take(np.unique(np.concatenate(spans))).tolist()
        bytes_of = {token: b"" if token == end else tokenizer.token_bytes(token) for token in {*targets, *covered}}
        text = hashlib.sha256(b"".join(bytes_of[token] for token in covered))
        return {"target_bytes": sum(len(bytes_of[token]) for token in targets), "text_sha256": text.hexdigest()}


@dataclass(frozen=True)
class Dataset:
    """What a config reads."""

    config: Config
    source: Source
    cache: TokenCache
    streams: Streams
    layout: Layout
    plan: str
    max_pieces: int
    """Pieces of every micro-batch of the run, empty ones included."""
    validation: ValidationSet
    manifest: dict[str, Any]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.cache.tokenizer

    @property
    def train(self) -> TokenStream:
        return self.streams.train

    def update_data(self, update: int) -> UpdateData:
        """What update 1, 2, ... is computed on; any of them, in any order, from any thread, always the same."""
        batch = self.config.batch
        is_isolated = batch.isolation or batch.layout != "packs"
        return make_update_data(self.train, self.layout, update, batch.micro_batches, self.max_pieces, is_isolated)

    def sampler_state(self, update: int) -> dict[str, Any]:
        """What a checkpoint after an update says of the data: the plan, and one integer."""
        return {"plan": self.plan, **self.layout.state_after(update)}

    def warnings(self) -> list[str]:
        """What works but is likely not what was meant."""
        epochs = self.config.batch.update_tokens / self.train.size
        if epochs <= 1:
            return []
        return [f"data: one update goes {epochs:.1f} times through the whole training text: give more text"]

    @property
    def folder(self) -> Path:
        """Where what was computed of these data is kept."""
        batch = {**dataclasses.asdict(self.config.batch), "micro_batches": None}
        made_from = [STATS_SCHEMA, self.manifest, batch, measured_updates(self.config, self.train)]
        return cache_path(self.config.data) / "datasets" / identity_of(made_from)[:16]

    def stats(self, progress: Progress) -> dict[str, Any]:
        """The content of `data-stats.json`: computed once, then kept beside the cache."""
        path = self.folder / STATS
        if path.exists():
            try:
                return read_sealed(path)
            except UserError:  # only figures, made from what is verified: made again
                path.unlink(missing_ok=True)
        updates = measured_updates(self.config, self.train)
        stats = data_stats(self.source, self.cache, self.streams, self.layout, self.manifest, updates, progress)
        with contextlib.suppress(OSError, LabError):  # where nothing can be kept, they are made again the next time
            write_sealed(path, stats)
        return stats


def measured_updates(config: Config, stream: TokenStream) -> int:
    """Of how many updates the pieces are counted: some hundreds, of which a tiny text needs no thousands of epochs."""
    in_reach = MOST_PLANNED * stream.size // config.batch.update_tokens
    return max(1, min(MOST_UPDATES, config.train.updates, in_reach))


def prepare_dataset(config: Config, progress: Progress | None = None, options: BuildOptions | None = None) -> Dataset:
    """Builds the data of a config, or finds them built. Raises UserError for text that cannot be used or is too
    little."""
    progress = progress or NoProgress()
    source = find_source(config.data, progress)
    cache = find_or_build(source, config.data, progress, options or BuildOptions())
    progress.show("Planning", 0, None, "")
    streams = split_cache(cache, source, config.data)
    layout = make_layout(streams.train, config.batch, config.model.max_positions, config.data.order_seed)
    tokenizer = cache.manifest["tokenizer"]
    validation = make_validation_set(streams.validation, tokenizer, config.eval, config.model.max_positions)
    plan = plan_identity(streams.train, layout)
    manifest = {
        "identity": identity_of([plan, validation.identity]),
        "source": {
            "source": config.data.source,
            **source.facts,
            **source.reading._asdict(),
            "limits": cache.manifest["made_from"]["limits"],
            "files": [file.entry() for file in source.files],
            "rejected": cache.manifest["rejected"],
        },
        "tokenizer": tokenizer,
        "cache": {
            "identity": identity_of(cache.manifest["made_from"]),
            **{key: cache.manifest[key] for key in ("documents", "tokens", "text_bytes", "dtype", "files")},
        },
        "duplicates": {"found": streams.duplicates, "policy": config.data.duplicates},
        "end_of_text": {"place": config.data.end_of_text, "token": streams.train.end_of_text.token},
        "split": {
            "rule": SPLIT_RULE,
            "salt": config.data.split_salt,
            "val_fraction": config.data.val_fraction,
            "train": streams.train.describe(),
            "validation": streams.validation.describe(),
        },
        "plan": {"identity": plan, **layout.manifest(), "labels": "the next token, within a piece"},
        "validation": {
            "identity": validation.identity,
            "pieces": len(validation.pieces.lengths),
            "target_tokens": validation.num_target_tokens,
            **validation.describe_text(cache.tokenizer),
        },
    }
    max_pieces = layout.max_pieces(config.train.updates, config.batch.micro_batches)
    return Dataset(config, source, cache, streams, layout, plan, max_pieces, validation, manifest)


def make_validation_set(
    stream: TokenStream, tokenizer: dict[str, Any], config: EvalConfig, max_positions: int
) -> ValidationSet:
    """The first tokens of the held-back documents, cut as configured. Raises UserError if none has a label."""
    size = min(config.tokens, stream.size)
    if config.pieces == "windows":
        starts = np.arange(0, max(size - 1, 0), max_positions, dtype=np.int64)
        lengths = np.minimum(max_positions, size - 1 - starts)
        pieces = Pieces(starts, lengths, lengths, np.arange(len(starts)))
    else:
        cuts = []
        for begin, end in zip(stream.offsets[:-1], np.minimum(stream.offsets[1:], size), strict=True):
            cuts += [(start, min(start + max_positions, end) - start) for start in range(begin, end, max_positions)]
        table = np.array(cuts, dtype=np.int64).reshape(-1, 2)
        pieces = Pieces(table[:, 0], table[:, 1], table[:, 1] - 1, np.arange(len(table)))
    if pieces.num_targets.sum() == 0:
        raise UserError(f"data: the validation text has no token to predict: {stream.size} tokens; give more documents")
    batch = make_batch(stream, pieces)
    identity = identity_of([sha256_of_bytes(batch.sha256().encode()), tokenizer, config.pieces, max_positions])
    return ValidationSet(stream, pieces, identity)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two data manifests, by name; for sources, by file."""
    found = []
    old_files, new_files = ({f["name"]: f["sha256"] for f in m["source"].get("files", [])} for m in (before, now))
    changed = [n for n in old_files if n in new_files and old_files[n] != new_files[n]]
    for what, names in (
        ("changed", changed),
        ("gone", [n for n in old_files if n not in new_files]),
        ("new", [n for n in new_files if n not in old_files]),
    ):
        if names:
            found.append(f"{len(names)} source files {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})")
    for key in ("tokenizer", "end_of_text", "duplicates", "split", "plan", "validation"):
        if before.get(key) != now[key]:
            found.append(f"{key} differs")
    return found
