"""Tests that ask for `lane` run once with each."""

import pytest

from jaxft._exchange import _compiled

from .lanes import loaded


@pytest.fixture(params=["python", "compiled"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    library = loaded(None) if request.param == "compiled" else None
    monkeypatch.setattr(_compiled, "library", lambda: library)
    return request.param
