"""`python -m jaxft` is the command `jaxft`."""

from jaxft._cli import main

main()
