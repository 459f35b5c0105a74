"""Pages of `verify` and `reproduce`, drawn from records alone, with the results that they read."""
