"""Audits: one model examined as a whole; `comparison/page.py` says the verdict."""
