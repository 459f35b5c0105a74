"""Loading language models, their families, and the reference transformer."""
