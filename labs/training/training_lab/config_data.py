"""The part of a config that decides what is read: which text, and how it becomes batches.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from training_lab.settings import Problem, derived, setting

FINEWEB_REVISION = "9bb295ddab0e05d785b879661af7260fed5140fc"


@dataclass(frozen=True)
class DataConfig:
    """Which text is learned from, and which is held back to measure on."""

    source: Literal["stdlib", "files", "shakespeare", "fineweb", "synthetic"] = "stdlib"
    """`stdlib`: the Python standard library's own source, which every machine has. `files`: your text, from
    `paths`. `shakespeare`: one pinned download of 1.1 MB. `fineweb`: web text from HuggingFaceFW/fineweb, pinned and
    verified. `synthetic`: generated, the same on every machine."""
    paths: tuple[str, ...] = setting((), only=("data.source", "files"))
    """Files, folders or globs, seen from the current directory: plain text and source code, JSONL, Parquet; text and
    JSONL also as .gz or .zst."""
    fineweb_files: tuple[str, ...] = setting(("sample/10BT/014_00000.parquet",), only=("data.source", "fineweb"))
    """Which files of FineWeb, by name or glob. The default, the smallest, has 281,664 documents in 575 MB."""
    fineweb_revision: str = setting(FINEWEB_REVISION, only=("data.source", "fineweb"))
    """Commit of the dataset, 40 hexadecimal digits; a branch or tag is looked up once and stays what it was then."""
    text_field: str = setting("text", only=("data.source", "files"))
    """The key of a JSONL record, or the column of a Parquet file, that holds the text."""
    documents: Literal["file", "paragraph"] = derived(
        "paragraph for shakespeare, else file",
        lambda get: "paragraph" if get("data.source") == "shakespeare" else "file",
        only=("data.source", "stdlib", "files", "shakespeare"),
    )
    """What one document of a text file is: the whole file, or the part of it up to and including a blank line. In
    JSONL and Parquet every record is a document."""
    invalid_text: Literal["refuse", "replace", "skip"] = derived(
        "skip for stdlib, else refuse",
        lambda get: "skip" if get("data.source") == "stdlib" else "refuse",
        only=("data.source", "stdlib", "files", "shakespeare", "fineweb"),
    )
    """What happens to a document that is not valid UTF-8: an error that names its place, U+FFFD for what is wrong, or
    the document is left out and counted."""
    max_documents: int = setting(0, at_least=0)
    """At most so many documents, from the beginning of the source; 0: all."""
    max_tokens: int = setting(0, at_least=0)
    """Documents from the beginning of the source, as long as they have at most so many tokens together; 0: all."""
    synthetic_documents: int = setting(512, at_least=2, only=("data.source", "synthetic"))
    """How many documents the generator makes, of 64 to 4,096 characters."""
    tokenizer: Literal["byte", "char", "gpt2"] = "byte"
    """`byte`: UTF-8 bytes, 256 tokens. `char`: the characters that occur. `gpt2`: GPT-2's 50,257 tokens."""
    val_fraction: float = setting(0.1, above=0.0, below=1.0)
    """Share of the documents held back for validation, chosen by a hash of their content."""
    split_salt: str = ""
    """Any text; another one holds back other documents."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Documents that are the same up to white space: `keep` counts them, `drop` leaves one of each. They always fall
    on the same side of the split."""
    end_of_text: Literal["none", "start", "end"] = derived(
        "start for gpt2, else none", lambda get: "start" if get("data.tokenizer") == "gpt2" else "none"
    )
    """Where each document has the token <|endoftext|>, which only `gpt2` has: `start`, so that its first word is
    predicted as well; `end`, so that the model learns to stop."""
    order_seed: int = derived("train.seed", lambda get: get("train.seed"), at_least=0)
    """Seed of the order in which the training text is read."""
    cache_dir: str = ".cache"
    """Where downloads and tokens are kept. Says where, not what: no part of the config's identity."""

    def problems(self) -> Iterator[Problem]:
        if self.source == "files" and not all(self.paths or [""]):
            yield Problem(
                "data.paths", "the source 'files' needs at least one file, folder or glob here, none of them empty"
            )
        if self.source == "fineweb" and not all(self.fineweb_files or [""]):
            yield Problem("data.fineweb_files", "the source 'fineweb' needs at least one name, none of them empty")
        if self.source == "fineweb" and not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", self.fineweb_revision):
            yield Problem("data.fineweb_revision", f"must be a commit, branch or tag, got {self.fineweb_revision!r}")
        if self.end_of_text != "none" and self.tokenizer != "gpt2":
            yield Problem(
                "data.end_of_text", f"the tokenizer {self.tokenizer!r} has no token for it; use none, or tokenizer gpt2"
            )


@dataclass(frozen=True)
class BatchConfig:
    """What one update is computed on."""

    layout: Literal["windows", "token_budget", "packs"] = "windows"
    """`windows`: random stretches of `block_size` tokens, wherever documents begin or end. `token_budget`: whole
    documents one after the other until `tokens` tokens are filled. `packs`: rows of `pack_length` tokens, filled with
    whole documents that fit together; only longer ones are cut. Nothing attends across documents in the last two."""
    block_size: int = setting(256, at_least=1, only=("batch.layout", "windows"))
    """Input tokens of one window."""
    batch_size: int = setting(32, at_least=1, only=("batch.layout", "windows"))
    """Windows in one update."""
    tokens: int = setting(8192, at_least=2, only=("batch.layout", "token_budget"))
    """Input tokens in one update."""
    pack_length: int = derived(
        "model.max_positions", lambda get: get("model.max_positions"), at_least=2, only=("batch.layout", "packs")
    )
    """Token slots of one pack."""
    packs: int = setting(8, at_least=1, only=("batch.layout", "packs"))
    """Packs in one update."""
    packing: Literal["best_fit", "next_fit", "bfd", "concat"] = setting("best_fit", only=("batch.layout", "packs"))
    """How documents are put together. `best_fit`: the oldest that waits, then again and again the longest that fits.
    `next_fit`: in their order, a new pack where one does not fit. `bfd`: best-fit decreasing, so many documents at a
    time. `concat`: one after the other, cut wherever a pack ends."""
    packing_buffer: int = setting(256, at_least=1, only=("batch.packing", "best_fit", "bfd"))
    """Documents that wait to be placed, or are placed at a time: more fill packs better and stray further from the
    shuffled order."""
    isolation: bool = setting(True, only=("batch.layout", "packs"))
    """Whether each document of a pack is seen for itself. Without it attention and positions go on across the documents
    of a pack; what is predicted stays the same."""
    micro_batches: int = setting(1, at_least=1)
    """Forward and backward passes into which an update is split: more of them need less memory, and the update stays
    the same. Several processes share them, and make as many more as gives all equally many."""

    @property
    def update_tokens(self) -> int:
        """Token slots of one update."""
        if self.layout == "packs":
            return self.packs * self.pack_length
        return self.batch_size * self.block_size if self.layout == "windows" else self.tokens

    def problems(self) -> Iterator[Problem]:
        if self.layout == "windows" and self.micro_batches > self.batch_size:
            yield Problem(
                "batch.micro_batches",
                f"cannot exceed the {self.batch_size} windows of batch.batch_size, got {self.micro_batches}",
            )
        rows = {"windows": self.batch_size, "packs": self.packs}.get(self.layout, self.micro_batches)
        if self.micro_batches < rows and rows % self.micro_batches:
            most = -(-rows // self.micro_batches)
            yield Problem(
                "batch.micro_batches",
                f"{self.micro_batches} does not divide the {rows} {self.layout} of an update: each micro-batch has the "
                f"size of {most}, and some are filled up with padding",
                is_fatal=False,
            )
        if self.layout == "packs" and self.micro_batches > self.packs:
            yield Problem(
                "batch.micro_batches",
                f"cannot exceed the {self.packs} packs of batch.packs, got {self.micro_batches}",
            )
