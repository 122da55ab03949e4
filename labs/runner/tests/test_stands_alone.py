"""The runner needs nothing but a Python: no installed package, and nothing of the training side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUNNER = Path(__file__).parent.parent


def test_it_is_imported_with_nothing_installed_and_brings_nothing_of_the_training_side() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(RUNNER)!r}); import experiment_runner; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "['__main__', 'experiment_runner']"
