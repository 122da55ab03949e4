"""Runs a job somewhere and brings its results home. Standard library only, Python 3.9; knows nothing of models."""

__version__ = "0.1.0"
