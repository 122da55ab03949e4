"""The update of `baseline` by two processes of one thread each, beside one process: what sharing it out costs.

    python benchmarks/several_processes.py [--set KEY=VALUE] [--turns 6]

All train the same batch of 32 windows in two micro-batches, in FP32 on the CPU, so all do the same arithmetic. They
take turns, as in peers.py: one runs while the others are stopped.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
from pathlib import Path

from peers import Peer, lab, print_table, take_turns


def ranks(processes: int) -> list[dict[str, str]]:
    """The environment that torchrun gives to each of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    count = str(processes)
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(processes)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of all")
    parser.add_argument("--updates", type=int, default=3, help="updates of a slice that count (3)")
    parser.add_argument("--turns", type=int, default=6, help="slices of each (6)")
    options = parser.parse_args()
    ways: dict[str, tuple[int, list[dict[str, str]]]] = {
        "2 processes, 1 thread each": (1, ranks(2)),
        "1 process, 1 thread": (1, [{}]),
        "1 process, 2 threads": (2, [{}]),
    }
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory() as name:
        try:
            for number, (way, (threads, environments)) in enumerate(ways.items()):
                folder = Path(name) / str(number)
                folder.mkdir()
                settings = [f"train.num_threads={threads}", "batch.micro_batches=2", *options.set]
                peers.append(Peer(way, lab(folder, "byte", settings), folder, folder / "log", environments))
                print(f"{way}: first update after {peers[-1].first_update_s:.1f} s", flush=True)
            take_turns(peers, options.turns, options.updates)
            print_table(peers, "2 processes are")
        finally:
            for one in peers:
                one.end()


if __name__ == "__main__":
    main()
