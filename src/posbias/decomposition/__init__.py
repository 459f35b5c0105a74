"""Ingredients of a model's profile, replaced one at a time, measured and in theory."""
