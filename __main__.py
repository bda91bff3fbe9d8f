"""`python -m fxopt`: the same as the command `fxopt`."""

from .cli import main

if __name__ == "__main__":
    main()
