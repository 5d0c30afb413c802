"""`python -m outpace`: the same as the command `outpace`."""

from .cli import main

if __name__ == "__main__":
    main()
