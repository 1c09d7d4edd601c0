"""`python -m jaxft_coordinator` is the command `jaxft-coordinator`."""

from jaxft_coordinator._cli import main

main()
