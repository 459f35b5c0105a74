"""Texts and token ids to measure on."""
