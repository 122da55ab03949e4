"""The first step: a small language model, of which word follows which two, from the texts that were sent."""

import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path


def main() -> None:
    texts, model = Path(sys.argv[1]), Path(sys.argv[2])
    following = defaultdict(Counter)
    for path in sorted(texts.glob("*.txt")):
        words = re.findall(r"\w+|[.,;]", path.read_text("utf-8").lower())
        for first, second, third in zip(words, words[1:], words[2:], strict=False):
            following[f"{first} {second}"][third] += 1
    model.write_text(json.dumps(following))
    print(f"{len(following):,} pairs of words in {model}")


if __name__ == "__main__":
    main()
