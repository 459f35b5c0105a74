"""Tasks: synthetic tasks to train on, and tasks in language for finished models."""
