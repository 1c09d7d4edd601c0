"""Keeps what strangers cause from filling a log."""

import logging
import time

# So many lines of a kind tell what goes on; a thousand tell no more.
_LINES = 20
_PERIOD_S = 60.0


class Sparse(logging.Filter):
    """Lets a logger say only so much in a while, and then how much it has left out."""

    def __init__(self) -> None:
        super().__init__()
        self._began_s = -_PERIOD_S
        self._said = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s - self._began_s >= _PERIOD_S:
            left_out = self._said - _LINES
            if left_out > 0:
                record.msg = f"{record.getMessage()} (before it, {left_out} more such lines were left out)"
                record.args = ()
            self._began_s, self._said = now_s, 0
        self._said += 1
        return self._said <= _LINES
