"""A laboratory for LLM pretraining experiments: exact, recorded, comparable."""

import importlib.util
import sys
from pathlib import Path

__version__ = "0.1.0"

RUNNER = Path(__file__).resolve().parents[2] / "runner"
if importlib.util.find_spec("experiment_runner") is None and RUNNER.is_dir():  # a checkout with nothing installed
    sys.path.append(str(RUNNER))
