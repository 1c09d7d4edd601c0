"""Exchanges that an attacker disturbs run once with each lane, like those of `tests/exchange`."""

from tests.exchange.conftest import lane as lane
