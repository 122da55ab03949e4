"""Compares runs: only on what is truly the same, with what differs by name, and the noise stated. Reads folders."""
