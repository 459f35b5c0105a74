"""One file per family of decoders."""
