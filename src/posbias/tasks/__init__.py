"""What models are asked to do: synthetic tasks to train on, and tasks in language for finished models."""
