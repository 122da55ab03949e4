"""Studies: one question, declared before anything runs, answered by repetitions of a config and of its changes."""
