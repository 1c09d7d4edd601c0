"""Availability of the peer."""

import pytest

from benchmarks import _peer


def leave_out_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make TorchFT unavailable for this test."""
    monkeypatch.setattr(_peer, "python", lambda: None)
