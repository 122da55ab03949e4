"""The trainer beside those that people use, on the same text, model and mathematics, slice by slice.

    git clone https://github.com/karpathy/nanoGPT
    pip install 'transformers>=5' 'accelerate>=1.1'                    only for --peer transformers
    python benchmarks/peers.py --nanogpt nanoGPT                       small vocabulary: bytes
    python benchmarks/peers.py --nanogpt nanoGPT --tokenizer gpt2      50,257 tokens

All train 6 layers of width 256 with 4 heads on windows of 256 tokens, 32 an update, in FP32 on the CPU, each in a
process of its own. All processes live at the same time but only one runs: it makes some updates while the others are
stopped (SIGSTOP), then the next. So whatever slows the machine down slows all of them down. An update's time is what
passes between two reports of a process; the first after each stop is not counted. Peak memory is that of the process.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from training_lab.data.dataset import prepare_dataset
from training_lab.data.stream import TokenStream
from training_lab.resolve import resolve_config

LOOPS = Path(__file__).resolve().parent / "peer_loops.py"
TOKENS_PER_UPDATE = 32 * 256
UPDATE = re.compile(r'"kind": "update"|^iter \d+')
FOREVER = 10**6


class Peer:
    """A trainer in a process of its own, or in several that differ in their environment. It runs only when it is told.

    The first process is the one that reports updates.
    """

    def __init__(
        self, name: str, command: list[str], folder: Path, log: Path, environments: Sequence[dict[str, str]] = ({},)
    ) -> None:
        self.name, self.times = name, list[float]()
        self.log = log
        with log.open("w") as errors:
            self.processes = [
                subprocess.Popen(
                    command, cwd=folder, stdout=errors if number else subprocess.PIPE, stderr=errors, text=True,
                    env={**os.environ, **environment},
                )
                for number, environment in enumerate(environments)
            ]  # fmt: skip
        started = time.perf_counter()
        self.next_update()
        self.first_update_s = time.perf_counter() - started
        self.next_update()
        self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes."""
        for process in self.processes:
            process.send_signal(number)

    def next_update(self) -> None:
        """Waits until the process has reported an update."""
        output = self.processes[0].stdout
        assert output is not None
        for line in output:
            if UPDATE.search(line):
                return
        sys.exit(f"{self.name} ended:\n{self.log.read_text()[-2000:]}")

    def run(self, updates: int) -> list[float]:
        """Lets it make some updates, and returns the seconds of each but the first."""
        self.signal(signal.SIGCONT)
        self.next_update()
        times, last = [], time.perf_counter()
        for _ in range(updates):
            self.next_update()
            times.append(time.perf_counter() - last)
            last = time.perf_counter()
        self.signal(signal.SIGSTOP)
        return times

    def peak_mib(self) -> float:
        """The most memory that the processes had, each for itself, together."""
        statuses = [Path(f"/proc/{process.pid}/status").read_text() for process in self.processes]
        return sum(int(status.split("VmHWM:")[1].split()[0]) for status in statuses) / 1024

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def lab(folder: Path, tokenizer: str, overrides: list[str]) -> list[str]:
    """The lab's own command, as everybody uses it."""
    own = [f"data.tokenizer={tokenizer}", f"data.cache_dir={folder / 'cache'}", "eval.tokens=256", "eval.every=0",
           f"train.updates={FOREVER}", f"checkpoint.every={FOREVER}", *overrides]  # fmt: skip
    settings = [word for override in own for word in ("--set", override)]
    return [sys.executable, "-u", "-m", "training_lab", "train", "--config", "baseline", "--new", "--json", *settings]


def nanogpt(folder: Path, is_compiled: bool) -> list[str]:
    """nanoGPT's train.py, unchanged, with its settings on the command line."""
    settings = {
        "dataset": "lab", "device": "cpu", "dtype": "float32", "compile": is_compiled, "n_layer": 6, "n_head": 4,
        "n_embd": 256, "block_size": 256, "batch_size": 32, "gradient_accumulation_steps": 1, "dropout": 0.0,
        "bias": False, "max_iters": FOREVER, "lr_decay_iters": 200, "warmup_iters": 20, "learning_rate": 3e-4,
        "min_lr": 3e-5, "eval_iters": 1, "eval_interval": FOREVER, "log_interval": 1, "out_dir": str(folder / "out"),
        "always_save_checkpoint": False,
    }  # fmt: skip
    return [sys.executable, "-u", "train.py", *(f"--{name}={value}" for name, value in settings.items())]


def write_data(repository: Path, tokenizer: str, cache_dir: Path) -> int:
    """The lab's tokens as nanoGPT reads them. Returns the size of the vocabulary."""
    config = resolve_config("baseline", [f"data.tokenizer={tokenizer}", f"data.cache_dir={cache_dir}"]).config
    dataset = prepare_dataset(config)
    folder = repository / "data" / "lab"
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, stream: TokenStream) -> None:
        stream.take(np.arange(stream.size)).astype(np.uint16).tofile(folder / name)

    write("train.bin", dataset.train)
    write("val.bin", dataset.validation.stream)
    meta = folder / "meta.pkl"
    meta.unlink(missing_ok=True)
    if tokenizer == "byte":  # without it nanoGPT takes 50,304
        meta.write_bytes(pickle.dumps({"vocab_size": dataset.tokenizer.vocab_size}))
    return dataset.tokenizer.vocab_size


def take_turns(peers: list[Peer], turns: int, updates: int) -> None:
    """Measures slices of `updates` updates of each, one after another, in an order that changes."""
    for turn in range(turns):
        shift = turn % len(peers)
        for one in peers[shift:] + peers[:shift]:
            one.times.append(statistics.median(one.run(updates)))
        print(f"turn {turn + 1}: " + ", ".join(f"{p.name} {p.times[-1]:.2f} s" for p in peers), flush=True)


def print_table(peers: list[Peer], first_is: str = "training_lab is") -> None:
    """Medians, ranges, and the median of the ratios within a turn, as Markdown."""
    first = peers[0]
    print(f"| | tokens/s | from – to | {first_is} | peak MiB | first update s |")
    print("|---|---|---|---|---|---|")
    for peer in peers:
        speeds = [TOKENS_PER_UPDATE / seconds for seconds in peer.times]
        ratio = statistics.median(other / own for own, other in zip(first.times, peer.times, strict=True))
        print(f"| {peer.name} | {statistics.median(speeds):,.0f} | {min(speeds):,.0f} – {max(speeds):,.0f} "
              f"| {f'{ratio:.2f} ×' if peer is not first else ''} | {peer.peak_mib():,.0f} "
              f"| {peer.first_update_s:.1f} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, metavar="FOLDER", help="a clone of karpathy/nanoGPT")
    parser.add_argument("--tokenizer", choices=["byte", "gpt2"], default="byte", help="byte: 256 tokens; gpt2: 50,257")
    names = ["eager", "compiled", "loss-only", "transformers", "frugal"]
    parser.add_argument("--peer", action="append", choices=names, metavar="NAME",
                        help=f"only these, of {', '.join(names)}: nanoGPT eager, compiled, compiled without handing "
                             "back logits; transformers' Trainer; the lab itself with 4 micro-batches")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of the lab")
    parser.add_argument("--updates", type=int, default=3, help="updates of a slice that count (3)")
    parser.add_argument("--turns", type=int, default=6, help="slices of each (6)")
    options = parser.parse_args()
    repository = options.nanogpt.resolve()
    chosen = options.peer or ["eager", "compiled", "loss-only", "frugal"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocab_size = str(write_data(repository, options.tokenizer, folder / "cache"))
        loops = [sys.executable, "-u", str(LOOPS)]
        commands = {
            "training_lab": (lab(folder, options.tokenizer, options.set), folder),
            "frugal": (lab(folder, options.tokenizer, [*options.set, "batch.micro_batches=4"]), folder),
            "eager": (nanogpt(folder, is_compiled=False), repository),
            "compiled": (nanogpt(folder, is_compiled=True), repository),
            "loss-only": ([*loops, "nanogpt-loss-only", vocab_size, str(repository)], repository),
            "transformers": ([*loops, "transformers", vocab_size, str(repository)], repository),
        }
        peers: list[Peer] = []
        try:
            for number, peer in enumerate(["training_lab", *chosen]):
                command, place = commands[peer]
                peers.append(Peer(peer, command, place, folder / f"{number}.log"))
                print(f"{peer}: first update after {peers[-1].first_update_s:.1f} s", flush=True)
            take_turns(peers, options.turns, options.updates)
            print_table(peers)
        finally:
            for one in peers:
                one.end()


if __name__ == "__main__":
    main()
