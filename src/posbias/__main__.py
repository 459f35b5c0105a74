"""`python -m posbias`: the same as `posbias`."""

from posbias.cli import main

if __name__ == "__main__":
    main()
