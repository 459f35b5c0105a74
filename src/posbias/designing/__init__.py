"""Design: the architecture, or the key bias of a model, whose profile is the one that is asked for."""
