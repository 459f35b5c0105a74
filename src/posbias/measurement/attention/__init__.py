"""Statistics of a model's attention without keeping its matrices (docs/theory, section 6)."""
