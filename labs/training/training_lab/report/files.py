"""What each file of a run is for, and what opens it. Pure."""

from __future__ import annotations

from training_lab import record

TEXT = ""
"""Any text editor opens it."""

ABOUT = {
    record.CONFIG: ("the resolved config, each value with its origin", TEXT),
    record.SOURCE: ("the commit, what was not committed, SHA-256 of each file that ran", TEXT),
    record.ENVIRONMENT: ("packages, processor, GPU and kernels of each process", TEXT),
    record.DATA_MANIFEST: ("what the data are made of, by hash", TEXT),
    record.DATA_STATS: ("lengths, packing, duplicates, split", TEXT),
    record.METRICS: (
        "one line an update, evaluation and event: the truth",
        "pandas.read_json(…, lines=True)",
    ),
    record.SUMMARY: ("key figures with their definitions", TEXT),
    record.WANDB: ("the mirror on Weights & Biases", TEXT),
    record.TIMELINE: ("operations of some updates, one by one", "https://ui.perfetto.dev"),
    record.MEMORY_SNAPSHOT: ("the history of the GPU's allocator", "https://docs.pytorch.org/memory_viz"),
    record.MEMORY_EVENTS: ("memory held over one update, and its phases", TEXT),
    record.NOTES: ("notes of whoever runs the experiment", TEXT),
    record.LAST_CHECKPOINT: ("the last state, to go on from", "torch.load(…, weights_only=True)"),
    "metrics.csv": ("the updates as a table", "any spreadsheet"),
}

BELOW = {
    "checkpoints/": ("a state to go on from", "torch.load(…, weights_only=True)"),
    "tensorboard/": ("events for TensorBoard", "tensorboard --logdir on this folder"),
    "wandb/": ("the offline mirror of Weights & Biases", "wandb sync"),
}


def about(name: str) -> tuple[str, str]:
    """What a file is, and what opens it, if not any text editor; empty for one that the lab does not write."""
    return ABOUT.get(name) or next((said for folder, said in BELOW.items() if name.startswith(folder)), ("", ""))
