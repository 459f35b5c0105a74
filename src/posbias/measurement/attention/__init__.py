"""What a model's attention looks like, without keeping it (docs/theory, section 6)."""
