"""The app of `posbias explore`: a marimo notebook, `app.py`, which marimo runs as a script; nothing here imports it."""
