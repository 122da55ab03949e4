"""Made text with something to learn in it, for golden values: integer arithmetic alone, so that every machine makes the
same bytes."""

from __future__ import annotations

from training_lab.data.documents import Document


def synthetic_document(number: int) -> Document:
    """A text of words of unequal frequency, each liking its own followers."""
    state = mix(number + 1)
    length = 64 << (state >> 8) % 6  # 64 to 2,048, then up to twice as long
    length += (state >> 16) % (length + 1)
    words: list[str] = []
    size, word = 0, 0
    while size < length:
        state = mix(state)
        rank = min((state >> 4) % 64, (state >> 12) % 64, (state >> 20) % 64)
        word = (word * 5 + rank + 1) % 64 if state % 4 else rank
        words.append(WORDS[word] + (".\n" if (state >> 32) % 12 == 0 else " "))
        size += len(words[-1])
    return Document(number, "".join(words)[:length])


def mix(value: int) -> int:
    """One step of SplitMix64 on a Python integer."""
    mask = (1 << 64) - 1
    z = (value + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


WORDS = [f"{first}{second}{end}" for first in "klmn" for second in "aeio" for end in ("", "n", "ra", "s")]
