"""With and without the peer."""

import pytest

from benchmarks import _peer


def leave_out_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if TorchFT could not be had, for this test."""
    monkeypatch.setattr(_peer, "python", lambda: None)
