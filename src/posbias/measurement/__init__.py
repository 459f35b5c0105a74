"""Influence, mixing and attention, measured on models."""
