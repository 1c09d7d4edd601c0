"""The command `jaxft`, whose groups wait for a second, not for a minute, for missing devices."""

from jaxft_launch.__main__ import main
from jaxft_launch.supervise import _plan

if __name__ == "__main__":
    _plan.PATIENCE_S = 1.0
    main()
