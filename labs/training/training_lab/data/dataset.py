"""Everything that a run reads: the batches of its updates, its fixed validation set, and the manifest of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from training_lab.config import Config, EvalConfig
from training_lab.data.batches import Batch, make_batch
from training_lab.data.corpus import Corpus, TokenStream, build_corpus
from training_lab.data.layout import Layout, Pieces, make_layout, plan_identity
from training_lab.data.tokenizers import Tokenizer
from training_lab.errors import UserError
from training_lab.identity import identity_of, sha256_of_bytes


@dataclass(frozen=True)
class ValidationSet:
    """Fixed pieces of held-back text. Losses are comparable exactly when the identities are the same."""

    stream: TokenStream
    pieces: Pieces
    identity: str

    @property
    def num_target_tokens(self) -> int:
        return int(self.pieces.num_targets.sum())


@dataclass(frozen=True)
class Dataset:
    """What a config reads."""

    tokenizer: Tokenizer
    train: TokenStream
    layout: Layout
    plan: str
    validation: ValidationSet
    manifest: dict[str, Any]

    def batch_of_update(self, update: int) -> Batch:
        """The whole of what update 1, 2, ... is computed on."""
        return make_batch(self.train, self.layout.pieces_of_update(update))


def prepare_dataset(config: Config) -> Dataset:
    """Builds the data of a config. Raises UserError for text that cannot be used or is too little."""
    corpus = build_corpus(config)
    layout = make_layout(corpus.train, config.batch, config.model.max_positions, config.data.order_seed)
    validation = make_validation_set(corpus, config.eval, config.model.max_positions)
    plan = plan_identity(corpus.train, layout)
    manifest = {
        **corpus.manifest,
        "plan": {"identity": plan, **layout.manifest()},
        "validation": {
            "identity": validation.identity,
            "pieces": len(validation.pieces.lengths),
            "target_tokens": validation.num_target_tokens,
        },
    }
    manifest["identity"] = identity_of([plan, validation.identity])
    return Dataset(corpus.tokenizer, corpus.train, layout, plan, validation, manifest)


def make_validation_set(corpus: Corpus, config: EvalConfig, max_positions: int) -> ValidationSet:
    """The first tokens of the held-back documents, cut as configured. Raises UserError if none has a label."""
    stream = corpus.validation
    size = min(config.tokens, len(stream.tokens))
    if config.pieces == "windows":
        starts = np.arange(0, max(size - 1, 0), max_positions, dtype=np.int64)
        lengths = np.minimum(max_positions, size - 1 - starts)
        pieces = Pieces(starts, lengths, lengths)
    else:
        cuts = []
        for begin, end in zip(stream.offsets[:-1], np.minimum(stream.offsets[1:], size), strict=True):
            cuts += [(start, min(start + max_positions, end) - start) for start in range(begin, end, max_positions)]
        table = np.array(cuts, dtype=np.int64).reshape(-1, 2)
        pieces = Pieces(table[:, 0], table[:, 1], table[:, 1] - 1)
    if pieces.num_targets.sum() == 0:
        raise UserError(
            f"data: the validation text has no token to predict: {len(stream.tokens)} tokens; give more documents"
        )
    batch = make_batch(stream, pieces)
    identity = identity_of(
        [sha256_of_bytes(batch.sha256().encode()), corpus.tokenizer.manifest(), config.pieces, max_positions]
    )
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
    for key in ("tokenizer", "split", "plan", "validation"):
        if before.get(key) != now[key]:
            found.append(f"{key} differs")
    return found
