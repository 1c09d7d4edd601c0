"""Standard streams that were closed before the program began (`>&-`), as some process managers start one."""

import os
import sys


def open_closed_streams() -> None:
    """Open /dev/null in place of each. Otherwise there is no `sys.stdout`, and a file or socket takes its number."""
    while (new := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(new, True)
    os.close(new)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
