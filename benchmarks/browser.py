"""Opens Chromium for benchmarks and images."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield the Chromium that is installed.

    Raises:
        SystemExit: there is none.
    """
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        raise SystemExit("error: chromium: must be installed, got none; try apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=list(ARGUMENTS))
        yield browser
        browser.close()
