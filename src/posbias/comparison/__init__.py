"""Distances between profiles and their intervals, always beside the flat baseline."""
