"""Layouts of decoders as data (`layout`, `table`), and their maps as numbers (`parts`)."""
