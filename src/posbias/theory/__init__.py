"""Predictions of position bias from the architecture."""
