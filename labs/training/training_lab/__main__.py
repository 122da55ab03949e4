"""`python -m training_lab`."""

import sys

from training_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
