"""`python -m training_lab`."""

import os
import sys

from training_lab.cli import main

if __name__ == "__main__":
    if sys.getfilesystemencoding() != "utf-8":
        # A locale without UTF-8 cannot name every file that a config may name: start again in Python's UTF-8 mode.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", "-m", "training_lab", *sys.argv[1:]])
    sys.exit(main())
