"""A page in headless Chromium that fails its test when it complains, or asks anybody but its server."""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Page, async_playwright


@asynccontextmanager
async def open_page(expects: Sequence[str] = (), **context: Any) -> AsyncIterator[Page]:
    """A page of a browser of its own.

    Args:
        expects: Complaints that hold one of these are part of the test.
        context: As `browser.new_context` takes it: the size of the window, light or dark.
    """
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("no chromium on PATH: install it to test the page")
    complaints: list[str] = []
    hosts: set[str] = set()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = await (await browser.new_context(**context)).new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: complaints.append(message.text) if message.type in NOISE else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname or "data"))
        try:
            yield page
        finally:
            await browser.close()
    assert [one for one in complaints if not any(part in one for part in expects)] == []
    assert hosts <= {"127.0.0.1", "data"}


NOISE = {"error", "warning", "assert"}
