"""Verdicts on methods, from paired differences by position, with corrected intervals."""
