"""Builds one token cache in process after process, killing each at a random moment, until it is built undisturbed.

    python kill_builds.py kill CORPUS CACHE KILLS SEED
    python kill_builds.py build CORPUS CACHE

A test runs this as a process of its own. The first tells, as JSON, how many blocks were there at each kill; the second
builds once and tells how many blocks it tokenised itself. Blocks are small and the tokenizer is slow.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tiny import tiny

from training_lab.data import build
from training_lab.data.cache import TokenCache, open_cache
from training_lab.data.sources import find_source
from training_lab.data.tokenizers import ByteTokenizer
from training_lab.progress import NoProgress

BLOCK_DOCUMENTS = 4
SLEEP_S = 0.006
encoded_blocks: list[int] = []


class SlowTokenizer(ByteTokenizer):
    """Bytes, after a nap."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        time.sleep(SLEEP_S)
        encoded_blocks.append(len(texts))
        return super().encode(texts)


def build_slowly(corpus: str, cache: str) -> TokenCache:
    build.BLOCK_DOCUMENTS = BLOCK_DOCUMENTS
    build.BLOCK_RULE = [BLOCK_DOCUMENTS, build.BLOCK_CHARACTERS]
    setattr(build, "make_tokenizer", lambda kind: SlowTokenizer())  # noqa: B010 - not exported from there
    config = tiny("data.source=files", f"data.paths={json.dumps([corpus])}", f"data.cache_dir={cache}").data
    return build.find_or_build(find_source(config, NoProgress()), config, NoProgress(), build.BuildOptions(2))


def visible_folders(cache: str) -> list[Path]:
    folder = Path(cache) / "tokens"
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def num_blocks(cache: str) -> int:
    """The blocks of the build that is going on; -1 if there is none."""
    for journal in Path(cache).glob("tokens/.building-*/journal.jsonl"):
        return journal.read_bytes().count(b"\n")
    return -1


def fork_build(corpus: str, cache: str) -> int:
    """Forks a process that builds; returns its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            build_slowly(corpus, cache)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def kill_builds(corpus: str, cache: str, kills: int, draws: random.Random) -> list[int]:
    """The blocks that were there at each kill. A cache that was finished meanwhile is taken away: begun anew."""
    found: list[int] = []
    while len(found) < kills:
        before = num_blocks(cache)
        pid = fork_build(corpus, cache)
        wait_s = draws.uniform(0.005, 0.12)
        deadline = time.monotonic() + wait_s
        is_waiting = len(found) % 2 == 0  # every other kill waits until the process has done something
        is_running = True
        while is_running and time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            is_running = ended == 0
            assert status == 0, "the build failed"
            for folder in visible_folders(cache):
                open_cache(folder)  # raises unless it is whole
            if is_waiting and num_blocks(cache) <= before:
                deadline = time.monotonic() + wait_s
            else:
                is_waiting = False
            time.sleep(0.001)
        if is_running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            found.append(num_blocks(cache))
        for number, folder in enumerate(visible_folders(cache)):
            open_cache(folder)
            folder.rename(Path(cache) / f"taken-away-{len(found)}-{number}-{pid}")
    return found


def main() -> None:
    command, corpus, cache = sys.argv[1:4]
    if command == "build":
        path = build_slowly(corpus, cache).path
        print(json.dumps({"blocks": len(encoded_blocks), "folder": path.name}))
        return
    found = kill_builds(corpus, cache, int(sys.argv[4]), random.Random(sys.argv[5]))
    _, status = os.waitpid(fork_build(corpus, cache), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    print(json.dumps(found))


if __name__ == "__main__":
    main()
