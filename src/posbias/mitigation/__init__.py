"""Mitigation of position bias in finished models, judged by position, with "do not apply" as a possible verdict."""
