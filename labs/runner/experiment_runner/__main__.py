"""`python -m experiment_runner`."""

import sys

from experiment_runner.cli import main

if __name__ == "__main__":
    sys.exit(main())
