"""Parameters of a method that suit one model, from calibration samples alone."""
