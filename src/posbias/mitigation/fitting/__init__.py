"""Parameters of a method that suit one model, from calibration samples alone."""

# Each registers its fits.
from posbias.mitigation.fitting import adapter, bias, channel_search  # noqa: F401
