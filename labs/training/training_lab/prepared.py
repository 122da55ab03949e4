"""The commands `data prepare` and `data verify`: what a config will be trained on, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from training_lab.config import Config
from training_lab.data.build import BuildOptions
from training_lab.data.dataset import Dataset, prepare_dataset
from training_lab.data.sources import find_source
from training_lab.data.tokenizers import verified_gpt2_files
from training_lab.errors import LabError, UserError
from training_lab.progress import Progress
from training_lab.record import Finding


def prepare(
    config: Config, progress: Progress, workers: int = 0, is_fast: bool = False
) -> tuple[Dataset, dict[str, Any]]:
    """The data of a config, and their figures. Raises UserError for text that cannot be used."""
    if is_fast and config.data.tokenizer != "gpt2":
        raise UserError(f"--fast: is for data.tokenizer gpt2, this config has {config.data.tokenizer!r}")
    dataset = prepare_dataset(config, progress, BuildOptions(workers, is_fast))
    return dataset, dataset.stats(progress)


def describe_dataset(dataset: Dataset, stats: dict[str, Any]) -> dict[str, str]:
    """What `data prepare` prints: a word, and what it says."""
    manifest, config = dataset.manifest, dataset.config
    source, split, packing = manifest["source"], stats["split"], stats["packing"]
    quantiles = stats["lengths"]["quantiles"]
    checked = stats["token_count_column"]
    windows = split["leaks"]["windows"]
    run_tokens = config.train.updates * config.batch.update_tokens
    lines = {
        "source": f"{config.data.source}: {plural(len(source['files']), 'file')}, {megabytes(source['files'])}"
        + (f", {source['repo']} at {source['revision']}" if "repo" in source else ""),
        "licence": "; ".join(stats["licence"].values()),
        "documents": f"{stats['documents']:,}, {stats['text_bytes'] / 1e6:,.1f} MB of text",
        "tokens": f"{stats['tokens']:,} of the tokenizer {config.data.tokenizer}, "
        f"{stats['bytes_per_token']:.2f} bytes each",
        "lengths": f"median {quantiles['50']:,.0f}, mean {stats['lengths']['mean']:,.0f}, 95 % up to "
        f"{quantiles['95']:,.0f}, 99 % up to {quantiles['99']:,.0f}, longest {quantiles['100']:,.0f} tokens",
        "left out": ", ".join(f"{number:,} {reason}" for reason, number in stats["rejected"].items() if number)
        or "nothing",
        "duplicates": f"{stats['duplicates']['found']:,} ({stats['duplicates']['policy']})",
        "token_count": f"{checked['checked']:,} checked, {checked['mismatches']:,} differ from what the source says",
        "train": f"{split['train']['documents']:,} documents, {split['train']['tokens']:,} tokens",
        "validation": f"{split['validation']['documents']:,} documents, {split['validation']['tokens']:,} tokens, of "
        f"which {manifest['validation']['target_tokens']:,} are measured on",
        "leaks": f"{split['leaks']['exact']['documents']:,} documents on both sides; {windows['documents']:,} of "
        f"{windows['documents_with_a_sampled_run']:,} validation documents share a run of tokens with the other side",
        "run": f"{config.train.updates:,} updates of {config.batch.update_tokens:,} token slots, "
        f"{run_tokens / split['train']['tokens']:.2f} epochs",
        "plan": f"{manifest['plan']['identity'][:16]}…, validation set {manifest['validation']['identity'][:16]}…",
        "cache": f"{dataset.cache.path}, {megabytes(manifest['cache']['files'].values())}",
    }
    if not checked["checked"]:
        del lines["token_count"]
    if packing:
        pieces = packing["pieces_per_pack"]
        lines["packs"] = (
            f"{packing['packs']:,} of {packing['pack_length']:,} slots an epoch ({packing['packing']}), "
            f"{packing['fill']:.2%} full; {pieces['mean']:.2f} pieces each, at most {pieces['max']}; "
            f"{packing['documents_cut_share']:.2%} of the documents are cut"
        )
    return lines


def plural(number: int, word: str) -> str:
    """A number of things."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def megabytes(files: Iterable[dict[str, Any]]) -> str:
    """The size of some files together."""
    return f"{sum(file['bytes'] for file in files) / 1e6:,.1f} MB"


def verify_data(config: Config, progress: Progress) -> Iterator[Finding]:
    """Hashes everything again: source files, tokenizer files, the cache; then makes plan and validation set again."""
    source = find_source(config.data, progress)
    for file in source.files:
        progress.show(f"Hashing {file.name}", 0, None, "")
        try:
            path = file.find()
        except LabError as error:
            yield Finding(f"source {file.name}", False, str(error))
            continue
        here = f"{path}: {file.bytes:,} bytes" if path else "is not here"
        yield Finding(f"source {file.name}", True, f"{here}, SHA-256 {file.sha256[:12]}…")
    if config.data.tokenizer == "gpt2":
        try:
            yield Finding("tokenizer", True, ", ".join(map(str, verified_gpt2_files().values())))
        except LabError as error:
            yield Finding("tokenizer", False, str(error))
    try:
        dataset = prepare_dataset(config, progress, BuildOptions(may_build=False))
    except LabError as error:
        yield Finding("cache", False, str(error))
        return
    for name, entry in dataset.cache.manifest["files"].items():
        message = f"{entry['bytes']:,} bytes, SHA-256 {entry['sha256'][:12]}…"
        yield Finding(f"cache {dataset.cache.path / name}", True, message)
    manifest = dataset.manifest
    yield Finding("plan", True, f"identity {manifest['plan']['identity'][:12]}…")
    yield Finding("validation set", True, f"identity {manifest['validation']['identity'][:12]}…")
