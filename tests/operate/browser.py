"""A real Chromium that looks at a coordinator's page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests import patience

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# The guard of the whole test comes first.
PATIENCE_MS = 1000 * patience.FAR_S


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of this machine; without one, the test is skipped."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs a browser: {', '.join(NAMES)}")
    with sync_playwright() as playwright:
        # A key scrolls at once, not over frames that a busy machine may not draw.
        arguments = ["--no-sandbox", "--disable-smooth-scrolling"]
        started = playwright.chromium.launch(executable_path=found, args=arguments, timeout=PATIENCE_MS)
        try:
            yield started
        finally:
            started.close()


@contextmanager
def page(url: str, **options: object) -> Iterator[tuple[Page, list[str]]]:
    """A page, and the errors that its scripts have raised or logged."""
    with browser() as started:
        shown = started.new_context(**options).new_page()  # pyright: ignore[reportArgumentType]
        shown.set_default_timeout(PATIENCE_MS)
        errors: list[str] = []
        shown.on("pageerror", lambda error: errors.append(str(error)))
        shown.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        shown.goto(url)
        yield shown, errors
