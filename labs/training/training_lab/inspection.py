"""What the model will see, for people: the rows of an update with their texts and labels; lengths and fill, drawn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from experiment_runner.durable import write_atomically
from training_lab.data.batches import IGNORED, make_batch
from training_lab.data.dataset import Dataset
from training_lab.data.layout import Pieces
from training_lab.data.tokenizers import decode
from training_lab.errors import LabError, UserError

COLOURS = ("cyan", "yellow", "green", "magenta")
END_OF_TEXT = "<|endoftext|>"
SHOWN_LABELS = 3


def describe_rows(dataset: Dataset, update: int, first_row: int, num_rows: int, characters: int) -> Iterator[Text]:
    """Some rows of an update, piece by piece: where each comes from, its text, and which labels it has.

    `characters` of each text are shown, half from either end. Raises UserError if the update has no such row.
    """
    pieces = dataset.layout.pieces_of_update(update)
    total = int(pieces.rows[-1]) + 1
    if not 0 <= first_row < total:
        raise UserError(f"--row {first_row}: update {update} has rows 0 to {total - 1}")
    for row in range(first_row, min(first_row + num_rows, total)):
        inside = np.flatnonzero(pieces.rows == row)
        part = pieces.part(inside[0], inside[-1] + 1)
        slots = dataset.layout.row_tokens or int(part.lengths.sum())
        yield Text(
            f"row {row} of update {update}: {part.lengths.sum():,} of {slots:,} slots, {len(inside)} pieces, "
            f"{part.num_targets.sum():,} target tokens",
            style="bold",
        )
        for number in range(len(inside)):
            yield from describe_piece(dataset, part.part(number, number + 1), number, characters)


def describe_piece(dataset: Dataset, piece: Pieces, number: int, characters: int) -> Iterator[Text]:
    """One piece: its origin, its text in a colour of its own, its first and last labels."""
    stream, start, length = dataset.train, int(piece.starts[0]), int(piece.lengths[0])
    batch = make_batch(stream, piece)
    names = stream.documents_between(start, start + length)
    document = int(np.searchsorted(stream.offsets, start, "right")) - 1
    begin = start - int(stream.offsets[document])
    origin = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} documents)"
    size = int(stream.offsets[document + 1] - stream.offsets[document])
    place = f"tokens {begin:,} to {begin + length - 1:,} of {size:,}" if len(names) == 1 else f"{length:,} tokens"
    yield Text(f"  piece {number}: {origin}, {place}", style="dim")
    text = shown_text(dataset, batch.tokens_T.tolist())
    if len(text) > characters:
        text = f"{text[: characters // 2]} […] {text[len(text) - characters // 2 :]}"
    style = COLOURS[number % len(COLOURS)]
    for line in text.split("\n"):
        yield Text.assemble(("  │ ", style), (printable(line), style))
    pairs = []
    for token, label in zip(batch.tokens_T.tolist(), batch.labels_T.tolist(), strict=True):
        wanted = "no label" if label == IGNORED else repr(shown_text(dataset, [label]))
        pairs.append(f"{shown_text(dataset, [token])!r} → {wanted}")
    if length > 2 * SHOWN_LABELS:
        pairs[SHOWN_LABELS:-SHOWN_LABELS] = ["…"]
    yield Text("  labels: " + ", ".join(pairs), style="dim")


def shown_text(dataset: Dataset, tokens: list[int]) -> str:
    """Tokens as text; the one that stands between documents by its name."""
    marker = dataset.train.end_of_text
    if marker.place == "none":
        return decode(dataset.tokenizer, tokens)
    runs = itertools.groupby(tokens, lambda token: token == marker.token)
    return "".join(
        END_OF_TEXT * len(list(run)) if is_marker else decode(dataset.tokenizer, run) for is_marker, run in runs
    )


def printable(line: str) -> str:
    """A line that moves no cursor and changes no colour, whatever is in it."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode("ascii") for c in line)


def draw(stats: dict[str, Any], path: Path, title: str) -> None:
    """Draws document lengths, and the fill of packs or the lengths of pieces, to a .png or .svg file."""
    import vl_convert

    if path.suffix not in (".png", ".svg"):
        raise UserError(f"--picture {path}: must end in .png or .svg")
    spec = picture(stats, title)
    try:
        if path.suffix == ".svg":
            content = vl_convert.vegalite_to_svg(spec).encode("utf-8")
        else:
            content = vl_convert.vegalite_to_png(spec, scale=2)
    except ValueError as error:
        raise LabError(f"the picture cannot be drawn: {error}") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--picture {path}: cannot be made: {error.strerror}") from error
    write_atomically(path, content)


def picture(stats: dict[str, Any], title: str) -> dict[str, Any]:
    """The Vega-Lite specification of the picture."""
    lengths = [{"bin": f"{one['from']:,}", "count": one["number"]} for one in stats["lengths"]["histogram"]]
    charts = [histogram(lengths, "Documents by length", "tokens, from", "documents")]
    if stats["packing"]:
        filled = [{"bin": f"{one['from']:.0%}", "count": one["packs"]} for one in stats["packing"]["fill_histogram"]]
        fill = f"Packs by fill: {stats['packing']['fill']:.2%} of all slots"
        charts.append(histogram(filled, fill, "share of slots filled, from", "packs"))
    pieces = [{"bin": f"{one['from']:,}", "count": one["number"]} for one in stats["pieces"]["histogram"]]
    charts.append(histogram(pieces, "Pieces by length", "tokens, from", "pieces"))
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": title, "anchor": "start", "fontSize": 15},
        "background": "white",
        "hconcat": charts,
        "config": {"font": "sans-serif", "axis": {"grid": False}, "view": {"stroke": None}},
    }


def histogram(rows: list[dict[str, Any]], title: str, x: str, y: str) -> dict[str, Any]:
    """Bars with their counts on them."""
    horizontal = {"field": "bin", "type": "ordinal", "sort": None, "title": x, "axis": {"labelAngle": -45}}
    vertical = {"field": "count", "type": "quantitative", "title": y, "axis": {"format": "~s"}}
    label = {"field": "count", "format": ".3~s"}
    return {
        "title": {"text": title, "fontWeight": "normal"},
        "width": 24 * max(len(rows), 8),
        "height": 220,
        "data": {"values": rows},
        "encoding": {"x": horizontal, "y": vertical},
        "layer": [
            {"mark": {"type": "bar", "color": "#4c78a8"}},
            {
                "mark": {"type": "text", "dy": -6, "fontSize": 9},
                "encoding": {"text": label},
                "transform": [{"filter": "datum.count > 0"}],
            },
        ],
    }
