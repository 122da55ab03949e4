"""Sent to a pod, and run there by the supervisor when nobody came for the results: the pod stops itself, its disk kept.

A pod finds a key of its own in its environment, which is good for itself alone. REST v2 does not take that key, GraphQL
does, for as long as there is GraphQL (RunPod has announced its end for early 2027): best effort, and said to be.

    python3 guard.py URL check     whether the key is there; exit code 0 if so
    python3 guard.py URL           stop
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path

USER_AGENT = "experiment-runner-guard/1"
STOP = "mutation Stop($id: String!) { podStop(input: {podId: $id}) { id desiredStatus } }"


def environment() -> dict[str, str]:
    """This process's variables, and those of the container: a session over SSH has them not."""
    try:
        text = Path("/proc/1/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        text = ""
    return {**dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry), **os.environ}


def main() -> int:
    """Checks, or stops."""
    found = environment()
    key, pod = found.get("RUNPOD_API_KEY"), found.get("RUNPOD_POD_ID")
    if not key or not pod:
        return 1
    if sys.argv[2:] == ["check"]:
        return 0
    body = json.dumps({"query": STOP, "variables": {"id": pod}}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "User-Agent": USER_AGENT}
    request = urllib.request.Request(sys.argv[1], body, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return 0 if "errors" not in json.load(response) else 1


if __name__ == "__main__":
    sys.exit(main())
