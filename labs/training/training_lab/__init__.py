"""A laboratory for LLM pretraining experiments: exact, recorded, comparable."""

__version__ = "0.1.0"
