"""`python -m jaxft` is the command `jaxft`."""

from jaxft._cli import main

if __name__ == "__main__":  # and not where a program imports every module of a package
    main()
