"""`python -m posbias`: the same as `posbias`."""

from posbias.cli import main

main()
