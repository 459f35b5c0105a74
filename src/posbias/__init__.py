"""posbias: how a transformer language model weighs the positions of its context."""
