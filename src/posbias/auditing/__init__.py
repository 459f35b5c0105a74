"""Audits: one model examined as a whole."""
