"""`make mutants`."""

import sys

from ._table import main

if __name__ == "__main__":
    sys.exit(main())
