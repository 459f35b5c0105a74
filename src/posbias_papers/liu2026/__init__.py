"""Stack of causal attention creates implicit positional embedding (Ziming Liu, 2026).

Its networks that copy one position, trained again and set beside its figures.
"""

from posbias_papers.liu2026 import experiment  # noqa: F401 (registered where it is defined)
