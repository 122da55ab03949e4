"""The data pipeline beside what a user would use instead: speed of tokenising, memory, opening, planning, reading.

    python benchmarks/data.py                 all of it, some minutes
    python benchmarks/data.py tokenise open   only these

Each figure is printed with what it is compared with, measured in the same process tree, turn by turn. Text: Python
source that lies on this machine, cut into documents whose lengths are distributed as FineWeb's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from experiment_runner.durable import sha256_of_file
from training_lab.config import Config
from training_lab.data.build import BuildOptions, find_or_build
from training_lab.data.cache import open_cache
from training_lab.data.dataset import prepare_dataset
from training_lab.data.layout import Packs
from training_lab.data.sources import find_source
from training_lab.data.stats import packing_stats
from training_lab.data.stream import TokenStream
from training_lab.data.tokenizers import Gpt2Tokenizer
from training_lab.progress import NoProgress
from training_lab.provenance import usable_cpus
from training_lab.resolve import resolve_config

MB = 1e6


def documents(megabytes: float) -> Iterator[str]:
    """Texts of together so many MB, the same for every call on one machine."""
    lengths = random.Random(0)
    left = int(megabytes * MB)
    while left > 0:
        for root in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
            for path in sorted(Path(root).rglob("*.py")):
                text = path.read_text("utf-8", errors="ignore")
                begin = 0
                while begin < len(text) and left > 0:
                    size = min(int(lengths.lognormvariate(7.5, 1.04)) + 1, left)
                    part = text[begin : begin + size]
                    begin += size
                    left -= len(part.encode("utf-8"))
                    yield part


def write_parquet(path: Path, megabytes: float) -> None:
    """The documents as a Parquet file, row group by row group so that it needs no memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        rows: list[str] = []
        for text in documents(megabytes):
            rows.append(text)
            if len(rows) == 1000:
                writer.write_table(pa.table({"text": rows}, schema))
                rows = []
        writer.write_table(pa.table({"text": rows}, schema))


def config_for(path: Path, cache_dir: Path, *overrides: str) -> Config:
    """The `corrected` data settings on a file of one's own."""
    own = ["data.source=files", f"data.paths={json.dumps([str(path)])}", f"data.cache_dir={cache_dir}"]
    return resolve_config("corrected", [*own, *overrides]).config


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def build(config: Config, is_fast: bool = False) -> None:
    find_or_build(find_source(config.data, NoProgress()), config.data, NoProgress(), BuildOptions(is_fast=is_fast))


def tokenise(folder: Path, repeats: int) -> None:
    """50 MB to a verified cache, from the file on, beside tiktoken's own batch on texts that are in memory already."""
    path = folder / "fifty.parquet"
    write_parquet(path, 50)
    texts = list(documents(50))
    size = sum(len(text.encode("utf-8")) for text in texts) / MB
    encoding = Gpt2Tokenizer()._encoding
    plain, ours, fast = [], [], []
    try:
        import gigatoken  # noqa: F401

        has_fast = True
    except ImportError:
        has_fast = False
    for turn in range(repeats):
        plain.append(size / seconds(lambda: encoding.encode_ordinary_batch(texts, num_threads=usable_cpus())))
        ours.append(size / seconds(lambda turn=turn: build(config_for(path, folder / f"cache-{turn}"))))  # type: ignore[misc]
        if has_fast:
            made = seconds(lambda turn=turn: build(config_for(path, folder / f"fast-{turn}"), is_fast=True))  # type: ignore[misc]
            fast.append(size / made)
    show("tokenise, MB/s: tiktoken alone, texts in memory", plain)
    show("tokenise, MB/s: file to verified cache", ours)
    print(f"  ratio of medians {statistics.median(ours) / statistics.median(plain):.2f}")
    if has_fast:
        show("tokenise, MB/s: the same with --fast", fast)
        same = [sha256_of_file(next((folder / f"{kind}-0/tokens").glob("*/tokens.bin"))) for kind in ("cache", "fast")]
        ratio = statistics.median(fast) / statistics.median(plain)
        print(f"  ratio of medians {ratio:.2f}; the same bytes: {same[0] == same[1]}")


def memory(folder: Path, repeats: int) -> None:
    """The most memory of a process that builds a small cache, and of one that builds a cache of 1 GB."""
    for megabytes in (50, 500):
        path = folder / f"{megabytes}.parquet"
        write_parquet(path, megabytes)
        code = (
            "import json, resource, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3]); import data\n"
            "config = data.config_for(Path(sys.argv[1]), Path(sys.argv[2]), 'data.tokenizer=byte')\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
            "data.build(config); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
        )
        cache_dir = folder / f"cache-{megabytes}"
        arguments = [sys.executable, "-c", code, str(path), str(cache_dir), str(Path(__file__).parent)]
        printed = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
        size = sum(file.stat().st_size for file in cache_dir.glob("tokens/*/*.bin")) / MB
        print(f"memory: a cache of {size:,.0f} MB built with a peak of {float(printed[1]):,.0f} MiB, "
              f"{float(printed[0]):,.0f} of them before (Python, torch)")  # fmt: skip


def open_(folder: Path, repeats: int) -> None:
    """Opening a cache of 200 million tokens, every byte hashed, and making its plan."""
    path = folder / "open.parquet"
    write_parquet(path, 200)
    config = config_for(path, folder, "data.tokenizer=byte", "data.end_of_text=none", "data.max_tokens=200000000")
    build(config)
    cache_path = next(path for path in (folder / "tokens").iterdir() if not path.name.startswith("."))
    tokens = len(open_cache(cache_path).tokens)
    show(f"open and verify {tokens:,} tokens, s", [seconds(lambda: open_cache(cache_path)) for _ in range(repeats)])
    show("the same, hashed source, split, plan and validation set, s",
         [seconds(lambda: prepare_dataset(config)) for _ in range(repeats)])  # fmt: skip


def plan(folder: Path, repeats: int) -> None:
    """Packs for an epoch of a million documents with FineWeb's lengths."""
    generator = np.random.Generator(np.random.PCG64(0))
    lengths = np.clip(np.exp(generator.normal(np.log(403), 1.037, 1_000_000)), 24, 400_000).astype(np.int64)
    hashes = generator.integers(0, 256, (len(lengths), 32), dtype=np.uint8)
    starts = np.cumsum(lengths) - lengths
    stream = TokenStream(np.zeros(0, np.uint16), starts, lengths, hashes, hashes, str)
    print(
        "| packing | buffer | full | pieces a pack | target tokens a pack | documents cut | packs < 90 % | worst | s |"
    )
    for packing, buffer in (
        ("best_fit", 64), ("best_fit", 256), ("best_fit", 1000), ("next_fit", 0), ("bfd", 256), ("bfd", 1000),
        ("bfd", 10_000), ("concat", 0),
    ):  # fmt: skip
        taken = []
        for _ in range(repeats):
            layout = Packs(stream, 4096, 35, packing, buffer, 0)
            taken.append(seconds(lambda layout=layout: layout.epoch(0)))  # type: ignore[misc]
        figures = packing_stats(layout)
        print(
            f"| `{packing}` | {buffer or ''} | {figures['fill']:.2%} | {figures['pieces_per_pack']['mean']:.2f} "
            f"| {figures['target_tokens_per_pack']:,.1f} | {figures['documents_cut_share']:.2%} "
            f"| {figures['packs_below_90_percent']:,} of {figures['packs']:,} | {figures['worst_pack']['tokens']:,} "
            f"| {statistics.median(taken):.2f} |",
            flush=True,
        )


def read(folder: Path, repeats: int) -> None:
    """Making the data of an update of `baseline`, beside the update itself."""
    config = dataclasses.replace(resolve_config("baseline").config)
    dataset = prepare_dataset(config)
    made = [seconds(lambda u=u: dataset.update_data(u)) for u in range(1, 50 * repeats)]  # type: ignore[misc]
    command = [sys.executable, "-m", "training_lab", "train", "--config", "baseline", "--new", "--json",
               "--stop-after", "16", "--set", "eval.tokens=4096", "--runs", str(folder / "runs")]  # fmt: skip
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    rows = [json.loads(line) for line in printed if '"kind": "update"' in line]
    update = statistics.median(row["seconds"] for row in rows[5:])
    show("make the data of a baseline update, ms", [1000 * one for one in made])
    print(f"  an update takes {1000 * update:,.0f} ms: {statistics.median(made) / update:.3%} of it, in the background")


def show(what: str, figures: list[float]) -> None:
    print(f"{what}: {statistics.median(figures):,.3g} ({min(figures):,.3g} - {max(figures):,.3g})", flush=True)


PARTS = {"tokenise": tokenise, "memory": memory, "open": open_, "plan": plan, "read": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--repeats", type=int, default=3, help="turns of each measurement (3)")
    options = parser.parse_args()
    print(f"{usable_cpus()} CPUs, Python {sys.version.split()[0]}, {os.uname().machine}")
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[part](Path(folder), options.repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"(this benchmark's own process had a peak of {peak:,.0f} MiB)")


if __name__ == "__main__":
    main()
