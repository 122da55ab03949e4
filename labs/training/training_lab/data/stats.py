"""What the data of a config are like: lengths, what was left out, duplicates, leaks across the split, packing.

The content of `data-stats.json`. Everything is counted, nothing sampled, except where a definition says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from training_lab.data.cache import TokenCache
from training_lab.data.layout import Layout, Packs
from training_lab.data.packing import Packing
from training_lab.data.sources import Source
from training_lab.data.stream import Streams, TokenStream
from training_lab.progress import Progress
from training_lab.seeds import splitmix64

STATS_SCHEMA = "data-stats-v1"
QUANTILES = (0, 5, 25, 50, 75, 90, 95, 99, 99.9, 100)
LEAK_WINDOW = 50
LEAK_SAMPLED = 64
CHUNK_TOKENS = 4 << 20
FILL_BINS = 20
MOST_UPDATES = 200


def data_stats(
    source: Source,
    cache: TokenCache,
    streams: Streams,
    layout: Layout,
    manifest: dict[str, Any],
    updates: int,
    progress: Progress,
) -> dict[str, Any]:
    """All figures of a dataset, from its verified parts; those of pieces from the first `updates` updates."""
    made = cache.manifest
    return {
        "data_identity": manifest["identity"],
        "licence": {key: source.facts[key] for key in ("licence", "licence_url", "attribution") if key in source.facts},
        "documents": made["documents"],
        "tokens": made["tokens"],
        "text_bytes": made["text_bytes"],
        "bytes_per_token": made["text_bytes"] / made["tokens"],
        "lengths": {
            "definition": "tokens of a document, without <|endoftext|>",
            **describe_lengths(cache.documents["tokens"].astype(np.int64)),
        },
        "rejected": {**made["rejected"]["counts"], "too short to predict anything": streams.too_short},
        "rejected_examples": made["rejected"]["examples"],
        "token_count_column": made["token_count_column"],
        "duplicates": {
            "definition": "documents that are the same as another, up to white space and Unicode form",
            **manifest["duplicates"],
        },
        "split": {
            "train": manifest["split"]["train"],
            "validation": manifest["split"]["validation"],
            "leaks": leaks(streams, progress),
        },
        "packing": packing_stats(layout) if isinstance(layout, Packs) else None,
        "pieces": piece_stats(layout, updates),
    }


def describe_lengths(lengths: np.ndarray) -> dict[str, Any]:
    """Mean, quantiles, and how many lengths lie between powers of two."""
    bins = np.bincount(np.frexp(lengths)[1])
    return {
        "mean": float(lengths.mean()),
        "quantiles": {f"{q:g}": float(np.percentile(lengths, q)) for q in QUANTILES},
        "histogram": [
            {"from": 1 << bit - 1, "below": 1 << bit, "number": int(number)}
            for bit, number in enumerate(bins)
            if bit and bins[: bit + 1].any()
        ],
    }


def leaks(streams: Streams, progress: Progress) -> dict[str, Any]:
    """How much of the validation text can be found in the training text."""
    train, validation = streams.train, streams.validation
    return {
        "exact": {
            "definition": "validation documents that are also in the training text, up to white space; the split "
            "puts them on one side, so this must be 0",
            "documents": int(np.isin(as_items(validation.content), as_items(train.content)).sum()),
        },
        "windows": {
            "definition": f"validation documents of which a run of {LEAK_WINDOW} tokens is also in the training text; "
            f"of all such runs, one in {LEAK_SAMPLED} is looked at, chosen by its hash",
            **shared_windows(train, validation, progress),
        },
    }


def as_items(hashes: np.ndarray) -> np.ndarray:
    """Rows of 32 bytes as single values that can be compared."""
    return np.ascontiguousarray(hashes).view("V32").ravel()


def shared_windows(train: TokenStream, validation: TokenStream, progress: Progress) -> dict[str, Any]:
    """The validation documents that share a sampled window with the training text, and those that have one at all."""
    found = list(sampled_windows(validation))
    hashes = np.concatenate([hashes for hashes, _ in found])
    documents = np.concatenate([documents for _, documents in found])
    wanted = np.unique(hashes)
    seen = np.zeros(len(wanted), dtype=bool)
    done = 0
    for in_train, _ in sampled_windows(train):
        seen |= np.isin(wanted, in_train)
        done += CHUNK_TOKENS
        progress.show("Looking for leaks across the split", min(done, train.size), train.size, "")
    leaked = np.unique(documents[np.isin(hashes, wanted[seen])])
    return {
        "documents": len(leaked),
        "documents_with_a_sampled_run": len(np.unique(documents)),
        "validation_documents": validation.num_documents,
    }


def sampled_windows(stream: TokenStream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A part of all runs of LEAK_WINDOW tokens inside documents: their hashes, and the number of the document.

    A run's hash is a polynomial of its tokens modulo 2^64, had from the differences of a running sum.
    """
    by_place = np.argsort(stream.starts, kind="stable")  # so that the cache is read from its beginning to its end
    ends = np.cumsum(stream.lengths[by_place])
    first = 0
    while first < len(by_place):
        begin = ends[first] - stream.lengths[by_place[first]]
        last = max(first + 1, int(np.searchsorted(ends, begin + CHUNK_TOKENS, "right")))
        chosen = by_place[first:last]
        lengths = stream.lengths[chosen]
        document = np.repeat(chosen, lengths)
        inside = np.arange(len(document)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tokens = stream.tokens[stream.starts[document] + inside]
        hashes = window_hashes(tokens)
        is_inside = document[: len(hashes)] == document[len(document) - len(hashes) :]
        is_sampled = is_inside & (hashes % np.uint64(LEAK_SAMPLED) == 0)
        yield hashes[is_sampled], document[: len(hashes)][is_sampled]
        first = last


def window_hashes(tokens: np.ndarray) -> np.ndarray:
    """The hash of every run of LEAK_WINDOW tokens, uint64."""
    base = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
    powers = np.cumprod(np.full(len(tokens), base, dtype=np.uint64))
    inverses = np.cumprod(np.full(len(tokens), pow(base, -1, 1 << 64), dtype=np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(splitmix64(tokens.astype(np.uint64)) * powers)])
    number = max(len(tokens) - LEAK_WINDOW + 1, 0)
    return splitmix64((sums[LEAK_WINDOW : LEAK_WINDOW + number] - sums[:number]) * inverses[:number])


def packing_stats(layout: Packs) -> dict[str, Any]:
    """How well the packs of the first epoch are filled, and what was cut for it."""
    segments = layout.epoch(0)
    tokens = np.concatenate([pack_tokens(segment) for segment in segments])
    pieces = np.concatenate([np.diff(segment.pack_ends, prepend=0) for segment in segments])
    lengths = np.concatenate([segment.lengths for segment in segments])
    documents = np.concatenate([segment.documents for segment in segments])
    parts = np.bincount(documents)
    sizes = np.diff(layout.stream.offsets)
    is_cut = parts > 1
    fill = tokens / layout.pack_length
    worst = int(np.argmin(tokens))
    return {
        "definition": "the packs of the first epoch; fill: slots that hold a token",
        "packing": layout.packing,
        "pack_length": layout.pack_length,
        "packs": len(tokens),
        "fill": float(tokens.sum() / (len(tokens) * layout.pack_length)),
        "fill_histogram": [
            {"from": low / FILL_BINS, "to": (low + 1) / FILL_BINS, "packs": int(number)}
            for low, number in enumerate(np.histogram(fill, FILL_BINS, (0.0, 1.0))[0])
        ],
        "worst_pack": {"pack": worst, "tokens": int(tokens[worst])},
        "packs_below_90_percent": int((fill < 0.9).sum()),
        "pieces": len(lengths),
        "pieces_per_pack": {"mean": float(pieces.mean()), "max": int(pieces.max())},
        "target_tokens": int((lengths - 1).sum()),
        "target_tokens_per_pack": float((lengths - 1).sum() / len(tokens)),
        "documents_cut": int(is_cut.sum()),
        "documents_cut_share": float(is_cut.sum() / layout.stream.num_documents),
        "tokens_in_cut_documents_share": float(sizes[is_cut.nonzero()[0]].sum() / layout.stream.size),
        "sum_of_squared_piece_lengths": int((lengths**2).sum()),
        "token_weighted_mean_piece": float((lengths**2).sum() / lengths.sum()),
    }


def pack_tokens(packing: Packing) -> np.ndarray:
    """How many tokens each pack holds."""
    ends = np.concatenate([[0], np.cumsum(packing.lengths)])[packing.pack_ends]
    return np.diff(ends, prepend=0)


def piece_stats(layout: Layout, updates: int) -> dict[str, Any]:
    """The pieces of the first updates: what attention costs is decided by the sum of their squared lengths."""
    lengths = np.concatenate([layout.pieces_of_update(update).lengths for update in range(1, updates + 1)])
    return {
        "definition": f"the pieces of the first {updates} updates of the sequence",
        "pieces": len(lengths),
        "input_tokens": int(lengths.sum()),
        "sum_of_squared_lengths": int((lengths**2).sum()),
        "token_weighted_mean": float((lengths**2).sum() / lengths.sum()),
        **describe_lengths(lengths),
    }
