"""Influence and mixing, measured on models."""
