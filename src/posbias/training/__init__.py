"""Controlled experiments: many small transformers trained at once as stacked programs, and studies of them."""
