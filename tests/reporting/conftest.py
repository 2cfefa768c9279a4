"""One browser for all tests of pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.browser import Browser, browser, missing


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if missing():
        pytest.skip(missing())
    with browser() as window:
        yield window


@pytest.fixture
def window(chromium: Browser) -> Browser:
    """The browser, with nothing in its logs; its size and theme are those of any page."""
    chromium.resize(1280, 900)
    chromium.ask("POST", "url", {"url": "about:blank"})
    chromium.complaints(), chromium.requests()
    return chromium
