"""Exchanges that an attacker disturbs run once with each lane, as in `tests/exchange`."""

from tests.exchange.conftest import lane as lane
