"""Trains what a config file says: `python base_train.py`, or on many GPUs
`torchrun --nproc_per_node=4 --nnodes=2 base_train.py`.

Without `--config` it reads `config.yaml` in the current folder. Everything else is that of `python -m training_lab
train`.
"""

from __future__ import annotations

import sys

from training_lab.cli import main

if __name__ == "__main__":
    given = sys.argv[1:]
    config = [] if "--config" in given else ["--config", "config.yaml"]
    sys.exit(main(["train", *config, *given]))
