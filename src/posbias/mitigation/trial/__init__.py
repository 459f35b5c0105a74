"""One trial of methods against position bias: arms, answers, side effects, one record."""
