"""Controlled experiments: many small transformers trained at once as one batched program."""
