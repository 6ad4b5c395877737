"""A real browser: Debian's chromium without a window, driven by selenium through its chromedriver."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.support.servers import ServerMissing

#: A directory to save pictures of the pages in; none are saved where it is not set.
PICTURES = "FLOWER_PICTURES"
SIZE = (1280, 720)
#: Most pixels of a page in a picture.
HIGHEST = 700
HOW_TO_GET_ONE = "no chromium with its chromedriver was found: `apt install chromium chromium-driver`"


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Start a browser, and quit it at the end.

    Raises:
        ServerMissing: there is none, or no driver for it.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        raise ServerMissing(HOW_TO_GET_ONE)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    width, height = SIZE
    # Without a sandbox, which root and containers have no right to; it sees pages of this test alone.
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
        options.add_argument(option)
    opened = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield opened
    finally:
        opened.quit()


def picture(browser: Any, name: str) -> None:
    """Save what the browser shows, 1280 pixels wide and as high as the page needs, where pictures are asked for."""
    directory = os.environ.get(PICTURES)
    if not directory:
        return
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": SIZE[0], "height": height(browser), "deviceScaleFactor": 1, "mobile": False},
    )
    browser.execute_script("document.documentElement.style.overflow = 'hidden'")
    browser.save_screenshot(str(Path(directory) / f"flower-{name}.png"))
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def height(browser: Any) -> int:
    """Return how high the page's content is, in pixels, within reason."""
    bottoms = "[...document.querySelectorAll('main *, body > *')].map(e => e.getBoundingClientRect().bottom)"
    return int(min(max(browser.execute_script(f"return Math.max(...{bottoms})") + 20, 360), HIGHEST))
