"""The second step: goes on with each prompt, and writes the answers and how long they took to where results belong."""

import json
import os
import re
import sys
import time
from pathlib import Path

LONGEST = 30


def go_on(following: dict, prompt: str) -> str:
    """The likeliest words after a prompt."""
    words = re.findall(r"\w+|[.,;]", prompt.lower())
    for _ in range(LONGEST):
        choices = following.get(" ".join(words[-2:]))
        if not choices:
            break
        words.append(max(choices, key=lambda word: (choices[word], word)))
        if words[-1] == ".":
            break
    return re.sub(r" ([.,;])", r"\1", " ".join(words))


def main() -> None:
    following = json.loads(Path(sys.argv[1]).read_text())
    results = Path(os.environ["EXPERIMENT_RESULTS"])
    seconds = []
    with open(results / "answers.jsonl", "w") as file:
        for prompt in Path(sys.argv[2]).read_text("utf-8").splitlines():
            began = time.perf_counter()
            answer = go_on(following, prompt)
            seconds.append(time.perf_counter() - began)
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
            print(f"{prompt} -> {answer}", flush=True)
    timings = {"prompts": len(seconds), "seconds": sum(seconds), "slowest_s": max(seconds)}
    (results / "timings.json").write_text(json.dumps(timings, indent=2) + "\n")


if __name__ == "__main__":
    main()
