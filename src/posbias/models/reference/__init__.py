"""Our own small transformer, built from an `Architecture`: the exact model that theory describes, to measure and train.

Its attention matrices come densely from the architecture's head groups and share no code with the kernels in `theory`.
With the default configuration a layer is x <- (1 - m) x + m mean_h A_h x in float64, so the Jacobian norms of the last
position are the rollout; content attention, norms, values and MLPs are switched on one by one.
"""
