"""Mirrors of a run's metrics on Weights & Biases and TensorBoard.

`metrics.jsonl` is the truth. A mirror reads it, in a process of its own, so that whatever becomes of the mirror can
neither change a bit of what is trained, nor make it wait; only the end of a run waits for it, and not for long.
"""
