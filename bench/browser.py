"""A headless Chromium of the distribution, for tests and pictures of the page."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from playwright.async_api import Browser, Playwright

_OPTIONS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def program() -> str | None:
    """Return where Chromium is; None: it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@asynccontextmanager
async def launched(playwright: Playwright) -> AsyncIterator[Browser]:
    """Run a browser for the block; FileNotFoundError without one."""
    path = program()
    if path is None:
        raise FileNotFoundError("chromium is not installed: python -m tools.servers")
    browser = await playwright.chromium.launch(executable_path=path, args=list(_OPTIONS))
    try:
        yield browser
    finally:
        await browser.close()
